"""Two clients on one daemon: what a long job and short ones cost each other.

Used by `bench/sharing.py`. Client A draws one long job, B short ones, each as soon as the last has
come. Every figure compares with the same jobs alone on the same daemon, just before and after.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench.kill_rounds import RestartedDaemon
from safetensors.numpy import load_file, save_file

from offload_client import Client
from offloadd.hosting.sources.sources import source_directory

PROMPT = "a red circle on a white background"
SHORT_STEPS = 4
WAIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Which models two clients use, and the daemon's configuration."""

    name: str
    long_model: str
    short_model: str
    config: str


@dataclass(slots=True)
class Measured:
    """Seconds alone and together. `step_s` is one of the long job's.

    What the long job stood still for, beyond what the short ones computed, is lost by the turns.
    """

    long_alone_s: float = 0.0
    long_shared_s: float = 0.0
    step_s: float = 0.0
    short_alone_s: list[float] = field(default_factory=list)
    short_shared_s: list[float] = field(default_factory=list)
    short_used_s: float = 0.0
    parked_s: float = 0.0
    is_identical: bool = False
    moved_bytes: int = 0
    """Of weights, by the short jobs, more than when they were alone."""

    def figures(self) -> dict[str, float]:
        """The aims of the bench, as numbers: a slowdown within its bound is at most 1 over it."""
        alone_s, shared_s = map(statistics.median, (self.short_alone_s, self.short_shared_s))
        bound_s = 2 * alone_s + 2 * self.step_s
        lost_s = self.long_shared_s - self.long_alone_s - self.short_used_s
        return {
            "short_job_alone_s": round(alone_s, 4),
            "short_job_shared_s": round(shared_s, 4),
            "short_job_slowdown": round(shared_s / alone_s, 3),
            "short_job_over_bound": round(shared_s / bound_s, 3),
            "short_jobs": len(self.short_shared_s),
            "short_jobs_used_s": round(self.short_used_s, 3),
            "lost_per_turn_s": round(
                (self.parked_s - self.short_used_s) / len(self.short_shared_s), 4
            ),
            "long_job_step_s": round(self.step_s, 4),
            "long_job_overhead": round(lost_s / self.long_alone_s, 3),
            "long_job_parked_s": round(self.parked_s, 2),
            "long_job_identical": int(self.is_identical),
            "short_job_moved_bytes": self.moved_bytes,
        }


def settings(folder: Path) -> Iterator[Setting]:
    """One model; two that fit the memory together; two that do not, so that one rests on disk."""
    other = other_model(folder / "other")
    bytes_of_one = sum(file.stat().st_size for file in other.rglob("*.safetensors"))
    both = (
        '[[models]]\nname = "shapes"\nsource = "builtin:shapes"\npreload = true\n'
        f'[[models]]\nname = "other"\nsource = {json.dumps(str(other))}\npreload = true\n'
    )
    yield Setting("one_model", "shapes", "shapes", both)
    yield Setting("two_models", "shapes", "other", both)
    budget = f"[store]\nhost_budget = {json.dumps(str(int(bytes_of_one * 1.3)))}\n"
    yield Setting("two_too_large", "shapes", "other", budget + both)


def other_model(directory: Path) -> Path:
    """A pipeline like `shapes`, with other weights, so that the store shares none of them."""
    shutil.copytree(source_directory("builtin:shapes"), directory)
    for file in directory.rglob("*.safetensors"):
        tensors = load_file(file)
        shrunk = {name: one * np.float32(0.999).astype(one.dtype) for name, one in tensors.items()}
        save_file(shrunk, file)
    return directory


@contextmanager
def started(setting: Setting, command: list[str]) -> Iterator[RestartedDaemon]:
    """A daemon of that setting, with both models in memory."""
    with tempfile.TemporaryDirectory(prefix="sharing-") as directory:
        folder = Path(directory)
        (folder / "offloadd.toml").write_text(setting.config)
        daemon = RestartedDaemon(command, folder)
        try:
            daemon.wait_until_ready()
            with daemon.client("warm") as client:
                for model in {setting.long_model, setting.short_model}:
                    client.load(model)
                    for steps in (SHORT_STEPS, 2 * SHORT_STEPS):
                        client.generate(model, prompt=PROMPT, num_inference_steps=steps)
            yield daemon
        finally:
            daemon.stop()


def share(daemon: RestartedDaemon, setting: Setting, long_steps: int, alone: int) -> Measured:
    """Measure the jobs alone, then together, then alone again."""
    measured = Measured()
    with daemon.client("long") as long_client, daemon.client("short") as short_client:

        def draw_alone() -> tuple[Any, int]:
            began_s = time.monotonic()
            undisturbed = _long(long_client, setting, long_steps)
            long_alone_s.append(time.monotonic() - began_s)
            for number in range(alone):
                took_s, result = _short(short_client, setting, number)
                measured.short_alone_s.append(took_s)
            return undisturbed, result.moved_bytes

        long_alone_s: list[float] = []
        undisturbed, moved_alone = draw_alone()
        drawn = _draw_together(long_client, short_client, setting, long_steps, measured)
        # Before and after, since no machine is as fast all the time.
        draw_alone()
    measured.long_alone_s = statistics.mean(long_alone_s)
    measured.step_s = undisturbed.timings.running_s / long_steps
    measured.parked_s = drawn.timings.parked_s
    measured.moved_bytes = max(0, measured.moved_bytes - moved_alone)
    measured.is_identical = drawn.image.tobytes() == undisturbed.image.tobytes()
    return measured


def _draw_together(
    long_client: Client, short_client: Client, setting: Setting, long_steps: int, into: Measured
) -> Any:
    """The long job, with short ones one after the other until its end."""
    over = threading.Event()
    drawn: list[Any] = []

    def draw_long() -> None:
        began_s = time.monotonic()
        drawn.append(_long(long_client, setting, long_steps))
        into.long_shared_s = time.monotonic() - began_s
        over.set()

    thread = threading.Thread(target=draw_long)
    thread.start()
    time.sleep(0.2)
    number = 0
    while not over.is_set():
        took_s, result = _short(short_client, setting, number)
        number += 1
        if not over.is_set():
            into.short_shared_s.append(took_s)
            into.short_used_s += result.timings.running_s
            into.moved_bytes = result.moved_bytes
    thread.join()
    return drawn[0]


@dataclass(frozen=True, slots=True)
class Alternated:
    """How often the device went from one model to the other, and how long it took."""

    switches: int
    took_s: float


def alternate(daemon: RestartedDaemon, models: tuple[str, str], jobs: int) -> Alternated:
    """Two clients, each with a model of its own, queue so many jobs at once."""
    ends: list[tuple[float, str]] = []
    began_s = time.monotonic()

    def run(model: str) -> None:
        with daemon.client(model) as client:
            queued = [
                client.submit(model, prompt=PROMPT, seed=number, num_inference_steps=SHORT_STEPS)
                for number in range(jobs)
            ]
            for job in queued:
                job.result(WAIT_S)
                ends.append((time.monotonic(), model))

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _alternated(ends, began_s)


def in_order_of_arrival(daemon: RestartedDaemon, models: tuple[str, str], jobs: int) -> Alternated:
    """The same jobs as they come in turn, each after the end of the last."""
    ends: list[tuple[float, str]] = []
    with daemon.client("in order") as client:
        began_s = time.monotonic()
        for number in range(jobs):
            for model in models:
                client.generate(model, prompt=PROMPT, seed=number, num_inference_steps=SHORT_STEPS)
                ends.append((time.monotonic(), model))
    return _alternated(ends, began_s)


def _alternated(ends: list[tuple[float, str]], began_s: float) -> Alternated:
    ends.sort()
    switches = sum(one[1] != two[1] for one, two in pairwise(ends))
    return Alternated(switches, ends[-1][0] - began_s)


def _long(client: Client, setting: Setting, steps: int) -> Any:
    return client.generate(
        setting.long_model, prompt=PROMPT, seed=7, num_inference_steps=steps, timeout_s=WAIT_S
    )


def _short(client: Client, setting: Setting, number: int) -> tuple[float, Any]:
    began_s = time.monotonic()
    result = client.generate(
        setting.short_model, prompt=PROMPT, seed=number, num_inference_steps=SHORT_STEPS
    )
    return time.monotonic() - began_s, result
