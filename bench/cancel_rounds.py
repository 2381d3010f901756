"""Submits jobs and cancels them at random points, and looks for what they leave behind.

Used by `bench/sharing.py` and by tests/system/test_no_job_lost.py.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from bench.kill_rounds import RestartedDaemon

from offload_protocol.errors import Cancelled

LONGEST_WAIT_S = 0.25
IN_FLIGHT = 4
PATIENCE_S = 120.0


@dataclass(slots=True)
class Cancels:
    """What became of the jobs, and what the worker held after the first tenth and after all."""

    cancelled: int = 0
    done_before: int = 0
    hanging: int = 0
    grown_bytes: int = 0
    grown_descriptors: int = 0
    grown_threads: int = 0
    next_is_right: bool = False
    errors: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, int]:
        """The keys of the bench."""
        return {
            "cancelled_jobs": self.cancelled,
            "cancel_came_too_late": self.done_before,
            "cancel_hanging": self.hanging,
            "cancel_grown_bytes": self.grown_bytes,
            "cancel_grown_descriptors": self.grown_descriptors,
            "cancel_grown_threads": self.grown_threads,
            "cancel_next_is_right": int(self.next_is_right),
        }


def cancel_rounds(
    daemon: RestartedDaemon, model: str, arguments: dict[str, Any], jobs: int, seed: int
) -> Cancels:
    """Cancel `jobs` jobs while they wait, load, compute, decode or have just ended."""
    source, cancels = random.Random(seed), Cancels()
    worker = psutil.Process(daemon.wait_until_ready())
    clients = [daemon.client(f"cancels-{number}") for number in range(2)]
    expected = clients[0].generate(model, seed=5, **arguments).image.tobytes()
    first, before = max(jobs // 10, 1), (0, 0, 0)
    for start in range(0, jobs, IN_FLIGHT):
        if start >= first and before == (0, 0, 0):
            before = _held(worker)
        waiting = []
        for number in range(start, min(start + IN_FLIGHT, jobs)):
            steps = {"num_inference_steps": source.randint(1, 12)}
            client = source.choice(clients)
            waiting.append(client.submit(model, seed=number, **{**arguments, **steps}))
            time.sleep(source.uniform(0, LONGEST_WAIT_S / IN_FLIGHT))
        source.shuffle(waiting)
        for job in waiting:
            time.sleep(source.uniform(0, LONGEST_WAIT_S / IN_FLIGHT))
            job.cancel()
        for job in waiting:
            try:
                job.result(PATIENCE_S)
                cancels.done_before += 1
            except Cancelled:
                cancels.cancelled += 1
            except TimeoutError as error:
                cancels.hanging += 1
                cancels.errors.append(repr(error))
    again = clients[0].generate(model, seed=5, **arguments).image.tobytes()
    cancels.next_is_right = again == expected
    after = _held(worker)
    cancels.grown_bytes, cancels.grown_descriptors, cancels.grown_threads = (
        late - early for late, early in zip(after, before, strict=True)
    )
    queue = clients[0].stats()["queue"]
    cancels.hanging += sum(queue[key] for key in ("depth", "running", "parked", "loading"))
    for client in clients:
        client.close()
    return cancels


def _held(worker: psutil.Process) -> tuple[int, int, int]:
    return worker.memory_info().rss, worker.num_fds(), worker.num_threads()
