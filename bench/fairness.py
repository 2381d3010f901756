"""Two clients on one daemon: what a long job and short ones cost each other.

Used by `bench/sharing.py`. Client A draws one long job, B short ones, each as soon as the last has
come. Every figure compares with the same jobs alone on the same daemon, just before.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from bench.kill_rounds import RestartedDaemon
from bench.odirect import MIB, best_rate
from bench.wide_models import Width, wide_model

from offload_client import Client

PROMPT = "a red circle on a white background"
SHORT_STEPS = 4
WAIT_S = 900.0
MODEL = Width(channels=256, layers=4)
"""Large enough that a step takes as long as on a card; the steps of `shapes` are of a few ms."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Which models two clients use, the daemon's configuration, and a file to try the disk with."""

    name: str
    long_model: str
    short_model: str
    config: str
    weights: Path


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one long job and of short ones, alone and then together.

    `used_s` is what the short jobs computed, `parked_s` what the long job stood still for.
    `long_moved_bytes` and `short_moved_bytes` are of weights, per job, more than alone.
    """

    long_alone_s: float
    long_shared_s: float
    step_s: float
    short_alone_s: list[float]
    short_shared_s: list[float]
    used_s: float
    parked_s: float
    long_moved_bytes: int
    short_moved_bytes: int
    is_identical: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """Several rounds of one setting, and the disk's rate: what moving a switch's bytes may take."""

    rounds: list[Round]
    bytes_per_s: float

    def figures(self) -> dict[str, float]:
        """The aims of the bench, as numbers: a slowdown within its bound is at most 1 over it."""
        alone_s, shared_s = (
            statistics.median(chain.from_iterable(times))
            for times in (
                (one.short_alone_s for one in self.rounds),
                (one.short_shared_s for one in self.rounds),
            )
        )
        step_s = self._median(lambda one: one.step_s)
        moved_s = self._median(lambda one: one.short_moved_bytes) / self.bytes_per_s
        bound_s = 2 * alone_s + 2 * step_s + moved_s
        jobs = sum(len(one.short_shared_s) for one in self.rounds)
        parked_s, used_s = (
            sum(times)
            for times in ([o.parked_s for o in self.rounds], [o.used_s for o in self.rounds])
        )
        return {
            "short_job_alone_s": round(alone_s, 4),
            "short_job_shared_s": round(shared_s, 4),
            "short_job_slowdown": round(shared_s / alone_s, 3),
            "short_job_over_bound": round(shared_s / bound_s, 3),
            "short_jobs": jobs,
            "short_job_moved_bytes": round(self._median(lambda one: one.short_moved_bytes)),
            "lost_per_turn_s": round((parked_s - used_s) / jobs, 4),
            "long_job_alone_s": round(self._median(lambda one: one.long_alone_s), 3),
            "long_job_step_s": round(step_s, 4),
            "long_job_overhead": round(self._median(self._overhead), 3),
            "long_job_moved_bytes": round(self._median(lambda one: one.long_moved_bytes)),
            "long_job_identical": int(all(one.is_identical for one in self.rounds)),
        }

    def _overhead(self, one: Round) -> float:
        lost_s = one.long_shared_s - one.long_alone_s - one.used_s
        return (lost_s - one.long_moved_bytes / self.bytes_per_s) / one.long_alone_s

    def _median(self, of: Callable[[Round], float]) -> float:
        return statistics.median(of(one) for one in self.rounds)


def settings(folder: Path) -> Iterator[Setting]:
    """One model; two that fit the memory together; two that do not, so that one rests on disk."""
    one, two = (wide_model(folder / name, MODEL, seed) for seed, name in enumerate(("one", "two")))
    bytes_of_one = sum(file.stat().st_size for file in one.rglob("*.safetensors"))
    both = "".join(
        f'[[models]]\nname = "{name}"\nsource = {json.dumps(str(source))}\npreload = true\n'
        for name, source in (("one", one), ("two", two))
    )
    weights = one / "unet" / "diffusion_pytorch_model.safetensors"
    yield Setting("one_model", "one", "one", both, weights)
    yield Setting("two_models", "one", "two", both, weights)
    budget = f"[store]\nhost_budget = {json.dumps(str(int(bytes_of_one * 1.3)))}\n"
    yield Setting("two_too_large", "one", "two", budget + both, weights)


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


def share(
    daemon: RestartedDaemon, setting: Setting, long_steps: int, alone: int, rounds: int
) -> Measured:
    """Measure the jobs alone and together, in turn, since no machine is as fast all the time."""
    with daemon.client("long") as long_client, daemon.client("short") as short_client:
        clients = (long_client, short_client)
        measured = [_round(clients, setting, long_steps, alone) for _ in range(rounds)]
    disk = best_rate(setting.weights, threads=(2, 4), chunks_bytes=(4 * MIB,))
    return Measured(measured, disk.bytes_per_s)


def _round(clients: tuple[Client, Client], setting: Setting, long_steps: int, alone: int) -> Round:
    long_client, short_client = clients
    # Before the long job, so that it finds its model evicted where it would be in the shared run.
    short_alone = [_short(short_client, setting, number) for number in range(alone)]
    long_alone_s, undisturbed = _long(long_client, setting, long_steps)
    together: list[tuple[float, Any]] = []
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(_long, long_client, setting, long_steps)
        time.sleep(0.2)
        while not long.done():
            one = _short(short_client, setting, len(together))
            if not long.done():
                together.append(one)
        long_shared_s, drawn = long.result()
    return Round(
        long_alone_s=long_alone_s,
        long_shared_s=long_shared_s,
        step_s=undisturbed.timings.running_s / long_steps,
        short_alone_s=[took_s for took_s, _ in short_alone],
        short_shared_s=[took_s for took_s, _ in together],
        used_s=sum(result.timings.running_s for _, result in together),
        parked_s=drawn.timings.parked_s,
        long_moved_bytes=max(0, drawn.moved_bytes - undisturbed.moved_bytes),
        short_moved_bytes=max(0, together[-1][1].moved_bytes - short_alone[-1][1].moved_bytes),
        is_identical=drawn.image.tobytes() == undisturbed.image.tobytes(),
    )


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


def _long(client: Client, setting: Setting, steps: int) -> tuple[float, Any]:
    began_s = time.monotonic()
    result = client.generate(
        setting.long_model, prompt=PROMPT, seed=7, num_inference_steps=steps, timeout_s=WAIT_S
    )
    return time.monotonic() - began_s, result


def _short(client: Client, setting: Setting, number: int) -> tuple[float, Any]:
    began_s = time.monotonic()
    result = client.generate(
        setting.short_model, prompt=PROMPT, seed=number, num_inference_steps=SHORT_STEPS
    )
    return time.monotonic() - began_s, result
