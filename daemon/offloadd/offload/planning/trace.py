"""Measures a component's steps on the device: what each position computes, how copies go.

Promises: recording never waits; only reading the figures does, for the last step's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offloadd.offload.accelerator.interface import Accelerator, Event
from offloadd.offload.streaming.transfers import Load, Timing

MAX_POSITIONS = 100_000


@dataclass(slots=True)
class _Position:
    group: int
    needed: Event
    had: Event


@dataclass(slots=True)
class _Step:
    begun: Event
    positions: list[_Position] = field(default_factory=list)
    finished: Event | None = None


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One whole step: `compute_s` for each position of `order`, from having a group to the next.

    What runs before the first position counts to it. `step_s` includes waiting for groups.
    """

    order: tuple[int, ...]
    compute_s: tuple[float, ...]
    step_s: float


class StepTrace:
    """Records whole steps while it is set; `copies` holds (bytes, seconds) of the loads seen."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._step: _Step | None = None
        self._steps: list[_Step] = []
        self._timings: list[Timing] = []

    @property
    def whole_steps(self) -> int:
        return len(self._steps)

    def begin(self) -> None:
        """A step starts; one under way did not end and is forgotten."""
        self._step = _Step(self._now())

    def need(self, group: int) -> None:
        """The step has come to where it needs a group."""
        if self._step is None:
            self._step = _Step(self._now())
        if len(self._step.positions) < MAX_POSITIONS:
            now = self._now()
            self._step.positions.append(_Position(group, now, now))

    def have(self, load: Load) -> None:
        """The group's weights are there as far as compute is concerned."""
        if self._step is not None and self._step.positions:
            self._step.positions[-1].had = self._now()
            if load.timing is not None:
                self._timings.append(load.timing)

    def finish(self) -> None:
        """The step ended."""
        if self._step is not None and self._step.positions:
            self._step.finished = self._now()
            self._steps.append(self._step)
        self._step = None

    def figures(self) -> tuple[StepFigures, ...]:
        """The whole steps, oldest first; waits until the device is done with them."""
        if self._steps and self._steps[-1].finished is not None:
            self._steps[-1].finished.synchronize()
        return tuple(_figures(step) for step in self._steps)

    def copies(self) -> tuple[tuple[int, float], ...]:
        """Bytes and seconds of every load that has ended, each load once."""
        each = {id(timing): timing for timing in self._timings}.values()
        durations = [(timing.size_bytes, timing.duration_s()) for timing in each]
        return tuple((size, seconds) for size, seconds in durations if seconds is not None)

    def _now(self) -> Event:
        event = self._accelerator.event(timed=True)
        event.record(self._accelerator.compute_queue())
        return event


def _figures(step: _Step) -> StepFigures:
    assert step.finished is not None
    positions = step.positions
    ends = [later.needed for later in positions[1:]] + [step.finished]
    compute_s = [position.had.elapsed_s(end) for position, end in zip(positions, ends, strict=True)]
    compute_s[0] += step.begun.elapsed_s(positions[0].needed)
    return StepFigures(
        order=tuple(position.group for position in positions),
        compute_s=tuple(compute_s),
        step_s=step.begun.elapsed_s(step.finished),
    )


def fit_link(copies: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Bandwidth (bytes a second) and latency (seconds) that explain the copies best.

    Least squares of seconds over bytes; with one size, or where the fit makes no sense, all time
    counts as bandwidth. Raises ValueError without copies.
    """
    total_bytes = sum(size for size, _ in copies)
    total_s = sum(seconds for _, seconds in copies)
    if not copies or total_s <= 0:
        raise ValueError("no copy was measured")
    mean_bytes, mean_s = total_bytes / len(copies), total_s / len(copies)
    spread = sum((size - mean_bytes) ** 2 for size, _ in copies)
    together = sum((size - mean_bytes) * (seconds - mean_s) for size, seconds in copies)
    per_byte_s = together / spread if spread else 0.0
    latency_s = mean_s - per_byte_s * mean_bytes
    if per_byte_s <= 0 or latency_s < 0:
        return total_bytes / total_s, 0.0
    return 1 / per_byte_s, latency_s
