"""Streaming a model larger than its memory from disk: ours against diffusers and accelerate.

A FLUX-shaped transformer of 1.41 GB with random bf16 weights does a step (256 image and 64 text
tokens) inside a memory cgroup of 1.1 GB, starting with a cold page cache; every contender runs in a
process of its own. The bound for each budget is the larger of the resident model's step and the
streamed bytes over the best rate that O_DIRECT gave before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.memory_cgroup import memory_cgroup
from bench.odirect import BestRate, best_rate

LIMIT_BYTES = 1_100_000_000
CONTENDER = Path(__file__).with_name("cpu_contenders.py")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True, slots=True)
class Result:
    """What a contender reported; `peak_bytes` is its cgroup's, 0 without one."""

    name: str
    step_s: float
    steps_s: tuple[float, ...]
    digest: str
    peak_bytes: int
    details: dict[str, Any]


def run(folder: Path, name: str, *arguments: str, limited: bool = True) -> Result | None:
    """Run a contender; None if it did not fit its cgroup."""
    _drop_page_cache(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, str(CONTENDER), name, "--folder", str(folder)]
        command += ["--scratch", scratch, *arguments]
        if not limited:
            return _result(name, _execute(command), 0)
        with memory_cgroup(LIMIT_BYTES) as group:
            outcome = _execute([*command, "--cgroup", str(group.path)])
            return _result(name, outcome, group.peak_bytes)


def _execute(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _result(name: str, outcome: subprocess.CompletedProcess[str], peak_bytes: int) -> Result | None:
    if outcome.returncode == -9:
        return None
    if outcome.returncode:
        raise RuntimeError(f"{name} failed:\n{outcome.stderr[-3000:]}")
    report = json.loads(outcome.stdout.splitlines()[-1])
    steps_s = tuple(report.pop("steps_s"))
    digest = report.pop("digest")
    return Result(name, statistics.median(steps_s), steps_s, digest, peak_bytes, report)


def _drop_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _print(result: Result, bound_s: float | None = None) -> None:
    line = f"{result.name:12} {result.step_s:6.3f} s a step"
    if bound_s is not None:
        details = result.details
        line += (
            f", bound {bound_s:.3f} ({result.step_s / bound_s:.2f}), budget "
            f"{details['budget_bytes'] / 1e6:.0f} MB: {details['resident_bytes'] / 1e6:.0f} stay, "
            f"ring {details['ring_bytes'] / 1e6:.0f}, streamed "
            f"{details['streamed_bytes'] / 1e6:.0f}, predicted {details['predicted_s']:.3f}"
        )
    if result.peak_bytes:
        line += f", peak {result.peak_bytes / 1e6:.0f} MB"
    print(line, flush=True)


def measure(folder: Path, quick: bool) -> dict[str, float | int | bool]:
    """Everything once, then the figures."""
    steps = ("--steps", "4" if quick else "8")
    before = best_rate(folder / WEIGHTS)
    alone = run(folder, "resident", *steps, limited=False)
    theirs = [run(folder, name, *steps) for name in ("diffusers", "accelerate")]
    nothing = run(folder, "nothing", *steps, "--slots", "4")
    if alone is None or nothing is None or None in theirs:
        raise RuntimeError("a contender that must fit did not")
    # Not among our dependencies: measured where somebody installed it.
    others = [run(folder, "aircanvas", *steps)] if find_spec("aircanvas") else []
    results = [nothing]
    for tenth in range(1, 11, 3 if quick else 1):
        result = run(folder, "ours", *steps, "--share", str(tenth / 10))
        if result is None:
            print(f"a budget of {tenth}/10 does not fit the cgroup")
            break
        results.append(result)
    after = best_rate(folder / WEIGHTS)
    diffusers, accelerate = (result for result in theirs if result is not None)
    for result in (alone, diffusers, accelerate, *others):
        if result is not None:
            _print(result)
    figures = _figures(alone, diffusers, accelerate, results, before, after)
    for other in others:
        if other is not None:
            figures["aircanvas_step_s"] = round(other.step_s, 4)
            figures["aircanvas_equal"] = other.digest == alone.digest
    return figures


def _figures(
    alone: Result,
    diffusers: Result,
    accelerate: Result,
    ours: Sequence[Result],
    before: BestRate,
    after: BestRate,
) -> dict[str, float | int | bool]:
    rate = max(before.bytes_per_s, after.bytes_per_s)
    over = []
    for result in ours:
        bound_s = max(alone.step_s, result.details["streamed_bytes"] / rate)
        over.append(result.step_s / bound_s)
        _print(result, bound_s)
    best = min(ours, key=lambda result: result.step_s)
    return {
        "speedup_vs_diffusers": round(diffusers.step_s / best.step_s, 3),
        "speedup_vs_accelerate": round(accelerate.step_s / best.step_s, 3),
        "speedup_nothing_resident": round(
            min(diffusers.step_s, accelerate.step_s) / ours[0].step_s, 3
        ),
        "worst_over_bound": round(max(over), 3),
        "outputs_equal": all(
            result.digest == alone.digest for result in (diffusers, accelerate, *ours)
        ),
        "peak_memory_bytes": max(result.peak_bytes for result in ours),
        "resident_step_s": round(alone.step_s, 4),
        "diffusers_step_s": round(diffusers.step_s, 4),
        "accelerate_step_s": round(accelerate.step_s, 4),
        "nothing_resident_step_s": round(ours[0].step_s, 4),
        "best_step_s": round(best.step_s, 4),
        "odirect_before_bytes_per_s": round(before.bytes_per_s),
        "odirect_after_bytes_per_s": round(after.bytes_per_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and budgets")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--directory", type=Path, help="keep the model here between runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        folder = (options.directory or Path(scratch)) / "flux"
        if not (folder / WEIGHTS).exists():
            command = [sys.executable, str(CONTENDER), "build", "--folder", str(folder)]
            subprocess.run(command, check=True)
        result = measure(folder, options.quick)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
