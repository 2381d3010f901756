"""What sharing one daemon costs, and that nothing is lost by it.

    python bench/sharing.py [--quick] [--only PART]... [--rounds N] [--json FILE]

- `turns`: client A draws one job of 200 steps (60 with --quick), B jobs of 4 steps, one after
  another: on one model, on two that both fit, and on two that do not. `short_job_slowdown` is B's
  median time over its time alone, `short_job_over_bound` over twice that plus two of A's steps (at
  most 1 is the aim), `long_job_overhead` what A lost beyond what B used, as a share of A's time
  alone (at most 0.1), `long_job_identical` whether A's picture is that of an undisturbed run. Where
  the models do not both fit, the bytes that a job moves more than alone are allowed at the disk's
  rate. Keys without a prefix are the worst of the three.
- `alternate`: two clients queue 20 jobs each on a model of their own: switches of the model and
  seconds, against the same jobs one after the other as they come.
- `kills`: eight clients draw without a pause, while worker or daemon is killed with SIGKILL at a
  random moment, 200 times (20 with --quick). Every accepted job has to be delivered once, with the
  pixels that it has undisturbed: `jobs_accepted`, `jobs_lost`, `jobs_duplicated`, `jobs_wrong`.
- `sweeps`: eight clients draw on one model whose weights are streamed from disk, with shared sweeps
  and without: jobs a minute, `sweep_speedup` (at least 4 is the aim), `sweep_identical` whether the
  pictures are the same; and the engine alone on a simulated link.
- `cancels`: 1,000 jobs (100 with --quick) are cancelled at random points: what the worker holds
  more than before, and whether the next picture is right.

Fails with 1 where a job is lost, doubled, wrong or hangs, or a picture differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.cancel_rounds import cancel_rounds
from bench.fairness import alternate, in_order_of_arrival, settings, share, started
from bench.kill_rounds import KillRounds, Load, RestartedDaemon
from bench.sweeps import simulated_figures, sweep_figures

COMMAND = [sys.executable, "-m", "offloadd"]
PROMPT = "a red circle on a white background"
STEPS = 2
PICTURES = 5

Figures = dict[str, float]


def main() -> int:
    options = _options()
    figures: Figures = {}
    for part in options.only or PARTS:
        began_s = time.monotonic()
        measured = PARTS[part](options)
        measured[f"{part}_took_s"] = round(time.monotonic() - began_s, 1)
        for key, value in measured.items():
            print(f"{key:44} {value}", flush=True)
        figures |= measured
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(_is_wrong(figures))


def turns(options: argparse.Namespace) -> Figures:
    """A long job and short ones."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
        for setting in settings(Path(folder)):
            with started(setting, COMMAND) as daemon:
                steps, rounds = (60, 1) if options.quick else (200, 3)
                measured = share(daemon, setting, steps, alone=10, rounds=rounds)
            figures |= {f"{setting.name}_{key}": one for key, one in measured.figures().items()}
    for key, worst in (
        ("short_job_slowdown", max),
        ("short_job_over_bound", max),
        ("long_job_overhead", max),
        ("long_job_identical", min),
    ):
        figures[key] = worst(value for name, value in figures.items() if name.endswith(key))
    return figures


def alternating(options: argparse.Namespace) -> Figures:
    """Two clients with a model each."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
        for setting in settings(Path(folder)):
            models = (setting.long_model, setting.short_model)
            if models[0] == models[1]:
                continue
            with started(setting, COMMAND) as daemon:
                strict = in_order_of_arrival(daemon, models, 20)
                shared = alternate(daemon, models, 20)
            figures |= {
                f"{setting.name}_switches": shared.switches,
                f"{setting.name}_switches_in_order": strict.switches,
                f"{setting.name}_took_s": round(shared.took_s, 2),
                f"{setting.name}_took_in_order_s": round(strict.took_s, 2),
            }
    return figures


def kills(options: argparse.Namespace) -> Figures:
    """Draw while worker and daemon are killed."""
    rounds = options.rounds or (20 if options.quick else 200)
    with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
        daemon = RestartedDaemon(COMMAND, Path(folder))
        try:
            daemon.wait_until_ready()
            pixels = _undisturbed(daemon)
            load = Load(
                "shapes",
                _request,
                lambda number, result: result.image.tobytes() == pixels[number % PICTURES],
            )
            counts = KillRounds(daemon, load, options.seed).run(rounds, longest_wait_s=3.0)
        finally:
            daemon.stop()
    for error in counts.errors:
        print(error, file=sys.stderr)
    return {**counts.figures(), "kill_rounds": rounds, "jobs_hanging": len(counts.errors)}


def sweeps(options: argparse.Namespace) -> Figures:
    """Eight clients share what one model streams, or do not."""
    return sweep_figures(1 if options.quick else 3) | simulated_figures()


def cancels(options: argparse.Namespace) -> Figures:
    """Cancel jobs at random points."""
    with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
        daemon = RestartedDaemon(COMMAND, Path(folder))
        try:
            arguments = {"prompt": PROMPT, "num_inference_steps": STEPS}
            jobs = 100 if options.quick else 1000
            done = cancel_rounds(daemon, "shapes", arguments, jobs, options.seed)
        finally:
            daemon.stop()
    for error in done.errors:
        print(error, file=sys.stderr)
    return dict(done.figures())


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "turns": turns,
    "alternate": alternating,
    "kills": kills,
    "sweeps": sweeps,
    "cancels": cancels,
}


def _is_wrong(figures: Figures) -> bool:
    bad = ("jobs_lost", "jobs_duplicated", "jobs_wrong", "jobs_hanging", "cancel_hanging")
    right = ("long_job_identical", "cancel_next_is_right", "sweep_identical")
    return any(figures.get(key, 0) for key in bad) or not all(figures.get(key, 1) for key in right)


def _undisturbed(daemon: RestartedDaemon) -> list[bytes]:
    with daemon.client("reference") as client:
        return [
            client.generate("shapes", **_request(number)).image.tobytes()
            for number in range(PICTURES)
        ]


def _request(number: int) -> dict[str, Any]:
    return {"prompt": PROMPT, "seed": number % PICTURES, "num_inference_steps": STEPS}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer steps, rounds and jobs")
    parser.add_argument("--only", action="append", choices=PARTS, help="do this part")
    parser.add_argument("--rounds", type=int, help="as many kills")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of kills and cancels")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
