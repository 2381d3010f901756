"""What the weight store gives: loading, memory, a crash, sharing, unloading, short budgets.

    python bench/store.py [--quick] [--only PART,...] [--json FILE] [--directory DIR]

On a random pipeline of about 3 GB in sharded bf16 (0.3 GB with --quick), with a cold page cache:

- `load`: seconds to the end of the first step, against `from_pretrained` and `from_pretrained` with
  group offloading to disk (`load_speedup_vs_from_pretrained`, `..._vs_group_offload_to_disk`); the
  rate at which the store brought the weights against the best raw O_DIRECT rate before and after
  (`load_over_odirect`; `..._paired` against the raw passes just before and after each load, which a
  busy machine disturbs less; `whole_load_over_odirect` counts all of the loading, modules and
  tokenizers included); the most host memory at once over the weights (`peak_host_over_weights`).
- `crash`: the worker killed, the weight files renamed away: `bytes_read_after_worker_kill`.
- `sharing`: a second pipeline with a copy of the text encoder in files of its own: the host bytes
  that it takes more, over those that it does not share (`second_pipeline_more_over_own`).
- `rounds`: 50 rounds (8) of load, run, unload over three models: `growth_bytes_per_round`.
- `budgets`: a host budget of 100, 60, 30% of the weights: seconds, and whether pictures are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.host_bytes import Peak, host_bytes, open_descriptors, tree
from bench.odirect import CHUNKS_BYTES, BestRate, best_rate, drop_caches
from bench.store_daemon import daemon
from bench.store_models import FULL, QUICK, TINY, Size, build, weight_files, with_encoder_of
from bench.store_rivals import KINDS

Figures = dict[str, float | int | bool]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the pipelines are, and how much is to be done."""

    folder: Path
    big: Path
    weights_bytes: int
    is_quick: bool

    def new(self, name: str) -> Path:
        """A directory that is not there yet, for a daemon."""
        return self.folder / name


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="store-") as name:
        folder = Path(name)
        size: Size = QUICK if options.quick else FULL
        weights_bytes = build(folder / "big", size)
        setting = Setting(folder, folder / "big", weights_bytes, options.quick)
        figures: Figures = {"weights_bytes": weights_bytes, "page_cache_dropped": drop_caches()}
        for part in options.only.split(",") if options.only else PARTS:
            found = PARTS[part](setting)
            figures |= found
            for key, value in found.items():
                print(f"{key:40} {value}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def load(setting: Setting) -> Figures:
    """Loading, against the disk and against the rivals."""
    chunks = CHUNKS_BYTES[::2] if setting.is_quick else CHUNKS_BYTES
    largest = max(weight_files(setting.big), key=lambda path: path.stat().st_size)
    before = best_rate(largest, chunks_bytes=chunks)
    ours, raw = [], [_raw_again(largest, before)]
    for turn in range(1 if setting.is_quick else 3):
        ours.append(_own_load(setting, f"load-{turn}"))
        raw.append(_raw_again(largest, before))
    after = best_rate(largest, chunks_bytes=chunks)
    figures = _against_disk(ours, before, after)
    paired = [
        2 * one["read_bytes"] / one["read_s"] / (raw[at] + raw[at + 1])
        for at, one in enumerate(ours)
    ]
    figures["load_over_odirect_paired"] = round(statistics.median(paired), 3)
    figures["peak_host_over_weights"] = round(
        max(one["peak_bytes"] for one in ours) / setting.weights_bytes, 3
    )
    figures["peak_host_file_bytes"] = max(one["file_bytes"] for one in ours)
    first_step_s = statistics.median(one["first_step_s"] for one in ours)
    figures["first_step_s"] = round(first_step_s, 2)
    for kind in KINDS:
        seconds, peak = _rival_load(setting, kind)
        figures[f"{kind}_first_step_s"] = round(seconds, 2)
        figures[f"load_speedup_vs_{kind}"] = round(seconds / first_step_s, 2)
        figures[f"{kind}_peak_over_weights"] = round(peak.grown_bytes / setting.weights_bytes, 3)
        figures[f"{kind}_peak_file_bytes"] = peak.file
    return figures


def _raw_again(path: Path, best: BestRate) -> float:
    return best_rate(path, threads=[best.threads], chunks_bytes=[best.chunk_bytes]).bytes_per_s


def _own_load(setting: Setting, name: str) -> dict[str, float]:
    with daemon(setting.new(name), {"big": setting.big}) as it:
        drop_caches()
        with Peak(it.pid) as peak:
            begin_s = time.perf_counter()
            result = it.draw("big", output_type="latent")
            first_step_s = time.perf_counter() - begin_s
        it.settled_read_bytes()
        parts = it.parts("big")
        read_s = sum(one["read_bytes"] / one["read_bytes_per_s"] for one in parts)
        return {
            "first_step_s": first_step_s,
            "loading_s": result.timings.loading_s,
            "read_bytes": sum(one["read_bytes"] for one in parts),
            "read_s": read_s,
            "peak_bytes": peak.grown_bytes,
            "file_bytes": peak.file,
        }


def _against_disk(loads: list[dict[str, float]], before: BestRate, after: BestRate) -> Figures:
    bound = max(before.bytes_per_s, after.bytes_per_s)
    rates = [one["read_bytes"] / one["read_s"] for one in loads]
    whole = [one["read_bytes"] / one["loading_s"] for one in loads]
    return {
        "load_over_odirect": round(max(rates) / bound, 3),
        "load_over_odirect_median": round(statistics.median(rates) / bound, 3),
        "whole_load_over_odirect": round(max(whole) / bound, 3),
        "load_bytes_per_s": round(max(rates)),
        "loading_s": round(statistics.median(one["loading_s"] for one in loads), 2),
        "odirect_before_bytes_per_s": round(before.bytes_per_s),
        "odirect_after_bytes_per_s": round(after.bytes_per_s),
    }


def _rival_load(setting: Setting, kind: str) -> tuple[float, Peak]:
    command = [sys.executable, str(Path(__file__).with_name("store_rivals.py")), kind]
    with subprocess.Popen(
        [*command, str(setting.big)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rival:
        assert rival.stdin is not None
        assert rival.stdout is not None
        assert rival.stdout.readline() == "ready\n"
        drop_caches()
        with Peak(rival.pid) as peak:
            rival.stdin.write("\n")
            rival.stdin.flush()
            seconds = float(rival.stdout.readline())
        rival.stdin.write("\n")
        rival.stdin.flush()
    return seconds, peak


def crash(setting: Setting) -> Figures:
    """A killed worker's successor, without the files."""
    with daemon(setting.new("crash"), {"big": setting.big}) as it:
        before = it.draw("big").image.tobytes()
        read_bytes = it.settled_read_bytes()
        hidden = [path.rename(path.with_suffix(".hidden")) for path in weight_files(setting.big)]
        try:
            begin_s = time.perf_counter()
            it.kill_worker()
            ready_s = time.perf_counter() - begin_s
            after = it.draw("big").image.tobytes()
            next_picture_s = time.perf_counter() - begin_s
            return {
                "bytes_read_after_worker_kill": it.settled_read_bytes() - read_bytes,
                "picture_after_worker_kill_equal": after == before,
                "worker_ready_after_kill_s": round(ready_s, 2),
                "next_picture_after_kill_s": round(next_picture_s, 2),
            }
        finally:
            for path in hidden:
                path.rename(path.with_suffix(".safetensors"))


def sharing(setting: Setting) -> Figures:
    """Two pipelines that hold the same encoder, each in files of its own."""
    other = setting.folder / "other"
    build(other, TINY, seed=1)
    # Its parts do not fit each other then: it is loaded and not run.
    with_encoder_of(other, setting.big)
    with daemon(setting.new("sharing"), {"big": setting.big, "other": other}) as it:
        it.client.load("big", str(setting.big))
        one_bytes = it.store("host_used_bytes")
        it.client.load("other", str(other))
        more_bytes = it.store("host_used_bytes") - one_bytes
        shared_bytes = sum(part["shared_bytes"] for part in it.parts("other"))
        own_bytes = sum(part["host_bytes"] for part in it.parts("other")) - shared_bytes
        return {
            "shared_encoder_bytes": shared_bytes,
            "deduplicated_bytes": it.store("deduplicated_bytes"),
            "second_pipeline_more_bytes": more_bytes,
            "second_pipeline_more_over_own": round(more_bytes / own_bytes, 3),
        }


def rounds(setting: Setting) -> Figures:
    """Loading, running and unloading again and again."""
    count = 8 if setting.is_quick else 50
    models = {name: setting.folder / name for name in ("a", "b", "c")}
    for seed, directory in enumerate(models.values()):
        build(directory, TINY, seed=seed + 10, shard="20MB")
    with daemon(setting.new("rounds"), models) as it:
        held: list[int] = []
        descriptors: list[int] = []
        files: list[int] = []
        for _ in range(count):
            for name in models:
                it.draw(name, output_type="latent")
                it.client.unload(name)
            held.append(host_bytes(tree(it.pid)).held)
            descriptors.append(open_descriptors(tree(it.pid)))
            files.append(sum(1 for _ in setting.folder.rglob("*")))
    return {
        "rounds": count,
        "growth_bytes_per_round": round(_slope(held[count // 5 :])),
        "growth_descriptors": descriptors[-1] - descriptors[1],
        "growth_files": files[-1] - files[1],
        "held_after_first_round_bytes": held[0],
        "held_after_last_round_bytes": held[-1],
    }


def budgets(setting: Setting) -> Figures:
    """Pictures where the host may hold less than the weights."""
    figures: Figures = {}
    pictures: list[bytes] = []
    for share in (100, 60, 30):
        budget = setting.weights_bytes * share // 100 + (1 << 20) * (share == 100)
        drop_caches()
        with daemon(setting.new(f"budget-{share}"), {"big": setting.big}, budget) as it:
            begin_s = time.perf_counter()
            pictures.append(it.draw("big").image.tobytes())
            figures[f"budget_{share}_first_picture_s"] = round(time.perf_counter() - begin_s, 2)
            result = it.draw("big", steps=4)
            figures[f"budget_{share}_four_steps_s"] = round(result.timings.running_s, 2)
            figures[f"budget_{share}_host_used_bytes"] = it.store("host_used_bytes")
            pictures.append(it.draw("big").image.tobytes())
    figures["budget_pictures_equal"] = len(set(pictures)) == 1
    return figures


def _slope(values: list[int]) -> float:
    """Bytes per round, by least squares."""
    line = statistics.linear_regression(range(len(values)), values)
    return line.slope


PARTS: dict[str, Callable[[Setting], Figures]] = {
    "load": load,
    "crash": crash,
    "sharing": sharing,
    "rounds": rounds,
    "budgets": budgets,
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small pipeline, few rounds")
    parser.add_argument("--only", default="", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--directory", type=Path, help="where to write the pipelines")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
