"""Progress is told at most so often, but always its beginning, its end and each change of state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from offload_protocol.errors import Cancelled
from offloadd.channel.messages import JobProgressed
from offloadd.worker.progress import MIN_INTERVAL_S, JobProgress


class Bench:
    """A job's progress on a clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cancelled = False
        self.told: list[JobProgressed] = []
        self.frames: list[bytes] = []
        self.progress = JobProgress("a", self.tell, self.look, lambda: self.now_s, 0.5)

    def tell(self, news: JobProgressed, frames: Sequence[Any]) -> None:
        self.told.append(news)
        self.frames += [bytes(frame) for frame in frames]

    def look(self) -> None:
        if self.cancelled:
            raise Cancelled("stop")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_fast_steps_are_told_only_at_both_ends(bench: Bench) -> None:
    for step in range(101):
        bench.progress.running(step, 100)
    assert [(one.step, one.steps) for one in bench.told] == [(0, 100), (100, 100)]


def test_slow_steps_are_all_told(bench: Bench) -> None:
    for step in range(6):
        bench.progress.running(step, 5)
        bench.now_s += 2 * MIN_INTERVAL_S
    assert [one.step for one in bench.told] == list(range(6))


def test_a_change_of_state_is_told_at_once(bench: Bench) -> None:
    bench.progress.loading(0, 5)
    bench.progress.loading(3, 5)
    bench.progress.running(1, 4)
    assert [(one.state, one.step) for one in bench.told] == [("loading", 0), ("running", 1)]


def test_pictures_are_shown_at_most_so_often_and_with_the_step(bench: Bench) -> None:
    latents = torch.zeros(1, 4, 2, 3)
    bench.progress.shown(latents)
    bench.progress.running(3, 9)
    for _ in range(11):
        bench.now_s += 0.1
        bench.progress.shown(latents)
    shown = [one for one in bench.told if one.preview is not None]
    assert [(one.step, one.steps, one.preview) for one in shown] == [
        (3, 9, {"$image": 0, "mode": "L", "size": [3, 2]})
    ] * 2
    assert bench.frames == [bytes(6)] * 2
    bench.now_s += 0.5
    bench.progress.shown(torch.zeros(1, 100, 64))
    assert len(bench.frames) == 2


LOOKS: dict[str, Callable[[JobProgress], None]] = {
    "loading": lambda progress: progress.loading(1, 2),
    "running": lambda progress: progress.running(1, 2),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_cancelled_job_stops_wherever_it_looks(bench: Bench, look: str) -> None:
    bench.cancelled = True
    with pytest.raises(Cancelled):
        LOOKS[look](bench.progress)
    assert bench.told == []
