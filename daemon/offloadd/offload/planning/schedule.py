"""A pure simulation of one ring, one transfer queue and one compute queue over repeated steps.

Promises: times follow from the arguments alone. Copies go out in the order of compute, each as soon
as the queue is idle and every place it overwrites has been computed with; a position computes as
soon as the one before is done and its own copy, if it needs one, has arrived. Steps follow each
other without a pause, and copies run ahead across the border between them as far as the ring goes.

For a given order this is the best there is: each start is the maximum of earlier ends, so every
later time grows with it, and waiting on purpose can only move later times back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offloadd.offload.streaming.ring import Place

WARM_STEPS = 3
MEASURED_STEPS = 4
"""How many steps are left out at the start, and over how many the step time is averaged."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step: per position the bytes to stream (0 for a resident), seconds to copy and compute.

    Bytes are multiples of the ring's alignment.
    """

    streamed_bytes: tuple[int, ...]
    copy_s: tuple[float, ...]
    compute_s: tuple[float, ...]

    @property
    def largest_bytes(self) -> int:
        """The smallest ring that works."""
        return max(self.streamed_bytes, default=0)

    @property
    def total_bytes(self) -> int:
        return sum(self.streamed_bytes)

    @property
    def bound_s(self) -> float:
        """No schedule is faster: all compute, or all copies, one after the other."""
        return max(sum(self.compute_s), sum(self.copy_s))


@dataclass(frozen=True, slots=True)
class Interval:
    """What one queue did from `start_s` to `stop_s`; a copy's `place` is where it went."""

    queue: Literal["transfer", "compute"]
    step: int
    position: int
    start_s: float
    stop_s: float
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Both queues from an empty ring on; `step_ends_s` is when each step's last compute was done.

    `step_s` is the average of the last steps.
    """

    intervals: tuple[Interval, ...]
    step_ends_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return steady_step_s(self.step_ends_s)


def simulate(
    work: StepWork, ring_bytes: int, *, steps: int = WARM_STEPS + MEASURED_STEPS
) -> Timeline:
    """Run `steps` steps through a ring as the engine's is, from empty.

    Raises ValueError if a group is larger than the ring.
    """
    intervals: list[Interval] = []
    ends = _exact_ends(work, ring_bytes, steps, intervals)
    return Timeline(tuple(intervals), tuple(ends))


def exact_step_s(
    work: StepWork, ring_bytes: int, *, steps: int = WARM_STEPS + MEASURED_STEPS
) -> float:
    """`simulate(...).step_s` without the timeline; infinite if a group is larger than the ring."""
    if work.largest_bytes > ring_bytes:
        return float("inf")
    return steady_step_s(_exact_ends(work, ring_bytes, steps, None))


def best_possible_step_s(
    work: StepWork, ring_bytes: int, *, steps: int = WARM_STEPS + MEASURED_STEPS
) -> float:
    """The step time that no schedule in this order beats with that many bytes of ring.

    Places need not be contiguous here: a copy starts once the bytes of all groups that are in the
    ring, its own included, are within `ring_bytes`. With equal groups and room for two of them it
    is the larger of compute and transfer. Infinite if a group is larger than the ring.
    """
    return steady_step_s(_step_ends(work, ring_bytes, steps, contiguous=False))


def quick_step_s(
    work: StepWork, ring_bytes: int, *, steps: int = WARM_STEPS + MEASURED_STEPS
) -> float:
    """About `exact_step_s`: for a ring that never looks behind live places, which is quicker.

    Equal for equal groups. Infinite if a group is larger than the ring.
    """
    return steady_step_s(_step_ends(work, ring_bytes, steps, contiguous=True))


def steady_step_s(step_ends_s: Sequence[float]) -> float:
    """The average step time after the first few of a run's steps."""
    if not step_ends_s:
        return float("inf")
    warm = min(WARM_STEPS, len(step_ends_s) - 1)
    if warm == 0:
        return step_ends_s[0]
    return (step_ends_s[-1] - step_ends_s[warm - 1]) / (len(step_ends_s) - warm)


class _RingWalk:
    """Where copies go in a ring, as `ring.Ring` has it when places are freed oldest first.

    A place is taken as soon as enough earlier positions are done: which ones those are does not
    depend on how long anything takes. The last one freed for a place always lies in it, for without
    it there was no place; so a copy waits for just that one, and later copies follow in the queue.
    """

    def __init__(self, ring_bytes: int) -> None:
        self.freed = -1
        self._ring_bytes = ring_bytes
        self._cursor = 0
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._ages: deque[tuple[int, int]] = deque()

    def place(self, size: int, position: int) -> int:
        """The first byte of the next place; `freed` is the last position it had to wait for."""
        while (found := self._find(size)) is None:
            self.freed, old = self._ages.popleft()
            index = bisect_left(self._starts, old)
            del self._starts[index], self._stops[index]
        start, index = found
        self._starts.insert(index, start)
        self._stops.insert(index, start + size)
        self._ages.append((position, start))
        self._cursor = start + size
        return start

    def _find(self, size: int) -> tuple[int, int] | None:
        starts, stops, count = self._starts, self._stops, len(self._starts)
        first, start = bisect_left(starts, self._cursor), self._cursor
        if first and stops[first - 1] > start:
            start = stops[first - 1]
        for index in (first, 0):
            while index < count:
                if start + size <= starts[index]:
                    return start, index
                start = stops[index]
                index += 1
            if start + size <= self._ring_bytes:
                return start, count
            start = 0
        return None


def _exact_ends(
    work: StepWork, ring_bytes: int, steps: int, intervals: list[Interval] | None
) -> list[float]:
    """When each step is done; adds what the queues did to `intervals`."""
    if work.largest_bytes > ring_bytes:
        raise ValueError(f"{work.largest_bytes} bytes never fit a ring of {ring_bytes} bytes")
    ring = _RingWalk(ring_bytes)
    positions = list(zip(work.streamed_bytes, work.copy_s, work.compute_s, strict=True))
    computed: list[float] = []
    ends: list[float] = []
    queue_free = now = 0.0
    for step in range(steps):
        for position, (size, copy_s, compute_s) in enumerate(positions):
            if size:
                place = ring.place(size, len(computed))
                start = max(queue_free, computed[ring.freed]) if ring.freed >= 0 else queue_free
                queue_free = start + copy_s
                now = max(now, queue_free)
                if intervals is not None:
                    where = Place(place, place + size)
                    intervals.append(Interval("transfer", step, position, start, queue_free, where))
            if intervals is not None:
                intervals.append(Interval("compute", step, position, now, now + compute_s))
            now += compute_s
            computed.append(now)
        ends.append(now)
    return ends


def _step_ends(work: StepWork, ring_bytes: int, steps: int, *, contiguous: bool) -> list[float]:
    """When each step is done; empty if a group is larger than the ring."""
    if work.largest_bytes > ring_bytes:
        return []
    positions = list(zip(work.streamed_bytes, work.copy_s, work.compute_s, strict=True))
    ends: list[float] = []
    # Each live copy: first byte, byte after the last, when its place may be overwritten.
    live: deque[tuple[int, int, float]] = deque()
    queue_free = now = 0.0
    head = used = 0
    for _ in range(steps):
        for size, copy_s, compute_s in positions:
            if not size:
                now += compute_s
                continue
            room = 0.0
            if contiguous:
                wraps = head + size > ring_bytes
                start = 0 if wraps else head
                stop = start + size
                while live:
                    old_start, old_stop, done = live[0]
                    overlaps = old_start < stop and start < old_stop
                    if not (overlaps or (wraps and old_start >= head)):
                        break
                    live.popleft()
                    room = done
                head = stop
            else:
                start, stop = 0, size
                used += size
                while used > ring_bytes:
                    _, old_size, room = live.popleft()
                    used -= old_size
            if room > queue_free:
                queue_free = room
            queue_free += copy_s
            if queue_free > now:
                now = queue_free
            now += compute_s
            live.append((start, stop, now))
        ends.append(now)
    return ends
