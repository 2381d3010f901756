"""A pure simulation of one ring, one transfer queue and one compute queue over repeated steps.

Promises: times follow from the arguments alone. Copies go out in the order of compute, each as soon
as the queue is idle and every place it overwrites has been computed with; a position computes as
soon as the one before is done and its own copy, if it needs one, has arrived. Steps follow each
other without a pause, and copies run ahead across the border between them as far as the ring goes.

For a given order this is the best there is: each start is the maximum of earlier ends, so every
later time grows with it, and waiting on purpose can only move later times back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from offloadd.offload.ring import Place, Ring
from offloadd.store.layout import ALIGNMENT_BYTES, align

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


def step_work(
    sizes_bytes: Sequence[int],
    order: Sequence[int],
    compute_s: Sequence[float],
    resident: frozenset[int],
    bandwidth_bytes_per_s: float,
    latency_s: float = 0.0,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> StepWork:
    """The work of a step whose order names groups, when those in `resident` are not streamed."""
    streamed = tuple(
        0 if group in resident else align(sizes_bytes[group], alignment_bytes) for group in order
    )
    copies = tuple(
        latency_s + sizes_bytes[group] / bandwidth_bytes_per_s if size else 0.0
        for group, size in zip(order, streamed, strict=True)
    )
    return StepWork(streamed, copies, tuple(compute_s))


def simulate(
    work: StepWork,
    ring_bytes: int,
    *,
    steps: int = WARM_STEPS + MEASURED_STEPS,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> Timeline:
    """Run `steps` steps through the engine's own ring, from empty.

    Raises ValueError if a group is larger than the ring.
    """
    places = _places(work, ring_bytes, steps, alignment_bytes)
    intervals: list[Interval] = []
    compute_ends: list[float] = []
    step_ends: list[float] = []
    queue_free = now = 0.0
    count = len(work.compute_s)
    for step in range(steps):
        for position in range(count):
            arrived = 0.0
            if work.streamed_bytes[position]:
                place, after = next(places)
                start = max(queue_free, compute_ends[after] if after >= 0 else 0.0)
                arrived = queue_free = start + work.copy_s[position]
                intervals.append(Interval("transfer", step, position, start, arrived, place))
            start = max(now, arrived)
            now = start + work.compute_s[position]
            compute_ends.append(now)
            intervals.append(Interval("compute", step, position, start, now))
        step_ends.append(now)
    return Timeline(tuple(intervals), tuple(step_ends))


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
    """`simulate(...).step_s` for a ring that never looks behind live places; for searching.

    Infinite if a group is larger than the ring.
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


def _places(
    work: StepWork, ring_bytes: int, steps: int, alignment_bytes: int
) -> Iterator[tuple[Place, int]]:
    """For each copy its place and the last position whose compute it waits for, -1 for none.

    A place is taken as soon as enough earlier positions are done, in order: which ones those are
    does not depend on how long anything takes.
    """
    ring = Ring(ring_bytes, alignment_bytes)
    live: deque[tuple[int, Place]] = deque()
    previous: dict[Place, int] = {}
    count = len(work.streamed_bytes)
    for index in range(steps * count):
        size = work.streamed_bytes[index % count]
        if not size:
            continue
        while (place := ring.allocate(size)) is None:
            released, old = live.popleft()
            ring.release(old)
            previous[old] = released
        after = -1
        for old, released in list(previous.items()):
            if old.overlaps(place):
                after = max(after, released)
                del previous[old]
        live.append((index, place))
        yield place, after


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
