"""What the search for a resident set is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from offloadd.offload.planning.schedule import StepWork


@dataclass(frozen=True, slots=True)
class Question:
    """Groups by index with their places in the order; all sizes are aligned.

    `room_bytes` is for residents and ring together. A ring must hold the largest group that is not
    resident, also one that the order does not name, since any call may need it.
    """

    sizes_bytes: tuple[int, ...]
    copy_s: tuple[float, ...]
    order: tuple[int, ...]
    compute_s: tuple[float, ...]
    room_bytes: int

    def work(self, resident: frozenset[int]) -> StepWork:
        """The step when `resident` are not streamed."""
        sizes, copies = self.sizes_bytes, self.copy_s
        return StepWork(
            tuple([0 if group in resident else sizes[group] for group in self.order]),
            tuple([0.0 if group in resident else copies[group] for group in self.order]),
            self.compute_s,
        )

    def resident_bytes(self, resident: Iterable[int]) -> int:
        return sum(self.sizes_bytes[group] for group in resident)

    def smallest_ring_bytes(self, resident: frozenset[int]) -> int:
        """What the ring must hold: the largest group that is not resident."""
        return max(
            (size for group, size in enumerate(self.sizes_bytes) if group not in resident),
            default=0,
        )

    def largest_ring_bytes(self, resident: frozenset[int]) -> int:
        """The room that residents leave, no more than all streamed groups together; negative, or
        under `smallest_ring_bytes`, if they do not fit."""
        total = sum(self.sizes_bytes)
        taken = self.resident_bytes(resident)
        return min(self.room_bytes - taken, total - taken)

    def fits(self, resident: frozenset[int]) -> bool:
        return self.largest_ring_bytes(resident) >= self.smallest_ring_bytes(resident)


@dataclass(frozen=True, slots=True)
class Answer:
    """A resident set with its ring, and the step time that the search found for it."""

    resident: frozenset[int]
    ring_bytes: int
    step_s: float


def ring_sizes(question: Question, resident: frozenset[int]) -> list[int]:
    """The rings worth trying: all room, and smaller ones that waste no bytes at their end.

    Those are the largest whole number of equal slots, and the two largest neighbours: in a ring
    that is a little larger places drift, and those two may never lie side by side.
    """
    smallest = question.smallest_ring_bytes(resident)
    largest = question.largest_ring_bytes(resident)
    if not smallest:
        return [0]
    streamed = [question.sizes_bytes[group] for group in question.order if group not in resident]
    neighbours = max(
        (first + second for first, second in pairwise([*streamed, *streamed[:1]])), default=0
    )
    sizes = (largest, largest // smallest * smallest, neighbours)
    return [size for size in dict.fromkeys(sizes) if smallest <= size <= largest]
