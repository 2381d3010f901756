"""Searches for the resident set and the ring that make a step shortest within a number of bytes.

Promises: the same question has the same answer (effort is counted, not timed); what it gives always
fits. Small questions are answered by trying every set. Larger ones start from residents spread over
the order, so that each streamed group has the compute of several positions to hide behind, in two
ways (evenly by bytes, and evenly against compute), at several ring depths; then neighbours are
tried: a group added, dropped, or exchanged. The event simulation judges every candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from offloadd.offload.planning.residency_question import Answer, Question, ring_sizes
from offloadd.offload.planning.schedule import exact_step_s, quick_step_s

EXHAUSTIVE_GROUPS = 8
"""Up to so many groups every resident set is tried."""

RING_DEPTHS = (1, 2, 3, 4, 6)
"""Ring sizes, in largest streamed groups, for which spread candidates are made."""

EXACT_POSITIONS = 64
"""Up to so many positions every candidate is judged exactly; in longer orders one group counts for
little, and the quick simulation is close."""

MINIMUM_EFFORT = 40_000
EFFORT_PER_POSITION = 200
"""Simulated positions that a search may cost."""

GOOD_ENOUGH = 1.002
"""A candidate this close to what no schedule can beat ends the search."""


@dataclass(slots=True)
class _Search:
    question: Question
    effort: int
    floor_s: float
    answers: dict[frozenset[int], Answer] = field(default_factory=dict)
    unexplored: dict[frozenset[int], float] = field(default_factory=dict)
    known: set[frozenset[int]] = field(default_factory=set)
    best: Answer | None = None

    @property
    def is_over(self) -> bool:
        return self.effort <= 0 or (
            self.best is not None and self.best.step_s <= self.floor_s * GOOD_ENOUGH
        )

    def judge(self, resident: frozenset[int]) -> None:
        """Simulate a candidate unless it is known, does not fit, or cannot win."""
        if resident in self.known or not self.question.fits(resident):
            return
        self.known.add(resident)
        self.effort -= len(self.question.order)
        work = self.question.work(resident)
        if self.best is not None and work.bound_s >= self.best.step_s:
            self.unexplored[resident] = work.bound_s
            return
        is_short = len(self.question.order) <= EXACT_POSITIONS
        step_time = exact_step_s if is_short else quick_step_s
        answer: Answer | None = None
        for ring in ring_sizes(self.question, resident):
            self.effort -= (14 if is_short else 7) * len(self.question.order)
            step_s = step_time(work, ring)
            if answer is None or step_s < answer.step_s:
                answer = Answer(resident, ring, step_s)
        assert answer is not None
        self.answers[resident] = answer
        self.unexplored[resident] = answer.step_s
        if self.best is None or answer.step_s < self.best.step_s:
            self.best = answer


def search(question: Question, exhaustive_groups: int = EXHAUSTIVE_GROUPS) -> list[Answer]:
    """The best answers found, fastest first.

    Raises ValueError if not even the empty resident set fits.
    """
    nothing: frozenset[int] = frozenset()
    if not question.fits(nothing):
        raise ValueError("the room holds no ring for the largest group")
    active = list(dict.fromkeys(question.order))
    effort = max(MINIMUM_EFFORT, EFFORT_PER_POSITION * len(question.order))
    state = _Search(question, effort, _floor_s(question, active))
    if len(active) <= exhaustive_groups:
        for resident in _all_sets(active):
            state.judge(resident)
    else:
        for resident in _spread_sets(question, active):
            if state.is_over:
                break
            state.judge(resident)
        state.judge(nothing)
        _improve(state, active)
    return sorted(state.answers.values(), key=lambda answer: (answer.step_s, answer.ring_bytes))


def _floor_s(question: Question, active: Sequence[int]) -> float:
    """What no plan can beat: all compute, or the copies that must remain.

    The room is filled with the groups that save most seconds a byte, the last one in part.
    """
    uses = dict.fromkeys(active, 0)
    for group in question.order:
        uses[group] += 1
    saving_s = {group: uses[group] * question.copy_s[group] for group in active}
    room = question.room_bytes
    sizes = [question.sizes_bytes[group] for group in active]
    if sum(sizes) > room:
        # Something is streamed, and the ring takes at least that much of the room.
        room -= min(sizes)
    left_s = sum(saving_s.values())
    ranked = sorted(active, key=lambda group: -saving_s[group] / question.sizes_bytes[group])
    for group in ranked:
        part = min(1.0, room / question.sizes_bytes[group])
        left_s -= part * saving_s[group]
        room -= question.sizes_bytes[group]
        room = max(0, room)
    return max(sum(question.compute_s), left_s)


def _all_sets(active: Sequence[int]) -> Iterator[frozenset[int]]:
    for mask in range(1 << len(active)):
        yield frozenset(group for bit, group in enumerate(active) if mask >> bit & 1)


def _spread_sets(question: Question, active: Sequence[int]) -> Iterator[frozenset[int]]:
    """Residents spread over the order, as many as fit beside rings of several depths."""
    ahead_s = dict.fromkeys(active, 0.0)
    for group, compute_s in zip(question.order, question.compute_s, strict=True):
        ahead_s[group] += compute_s
    by_bytes = {group: float(question.sizes_bytes[group]) for group in active}
    for depth in RING_DEPTHS:
        for weights in (by_bytes, ahead_s):
            spread = _tightest_spread(question, active, weights, depth)
            if spread is not None:
                yield _filled(question, active, spread, depth)
                yield spread


def _tightest_spread(
    question: Question, active: Sequence[int], weights: dict[int, float], depth: int
) -> frozenset[int] | None:
    """The spread with fewest streamed bytes that leaves room for `depth` of the largest."""

    def fits(resident: frozenset[int]) -> bool:
        ring = depth * question.smallest_ring_bytes(resident)
        return question.resident_bytes(resident) + ring <= question.room_bytes

    total_bytes = sum(question.sizes_bytes[group] for group in active)
    total_weight = sum(weights.values())
    if not total_weight:
        return None
    best: frozenset[int] | None = None
    low, high = 0.0, 2.0
    for _ in range(12):
        share = (low + high) / 2
        resident = _spread(question, active, weights, share * total_bytes / total_weight)
        if fits(resident):
            best, high = resident, share
        else:
            low = share
    return best


def _spread(
    question: Question, active: Sequence[int], weights: dict[int, float], bytes_per_weight: float
) -> frozenset[int]:
    """Stream a group whenever the weight passed since the last ones has earned half its bytes."""
    resident: set[int] = set()
    earned_bytes = 0.0
    for group in active:
        earned_bytes += weights[group] * bytes_per_weight
        size = question.sizes_bytes[group]
        if earned_bytes >= size / 2:
            earned_bytes -= size
        else:
            resident.add(group)
    return frozenset(resident)


def _filled(
    question: Question, active: Sequence[int], resident: frozenset[int], depth: int
) -> frozenset[int]:
    """Make further groups resident, large ones first, while the ring keeps its depth."""
    chosen = set(resident)
    taken = question.resident_bytes(resident)
    ring = depth * question.smallest_ring_bytes(resident)
    for group in sorted(active, key=lambda group: -question.sizes_bytes[group]):
        size = question.sizes_bytes[group]
        if group not in chosen and taken + size + ring <= question.room_bytes:
            chosen.add(group)
            taken += size
    return frozenset(chosen)


def _improve(state: _Search, active: Sequence[int]) -> None:
    """Try the neighbours of the best candidate whose neighbours are untried, again and again.

    Going on from the second best once the best has no better neighbour leaves local optima behind,
    which uneven groups have many of.
    """
    while state.unexplored and not state.is_over:
        start = min(state.unexplored, key=lambda resident: state.unexplored[resident])
        del state.unexplored[start]
        best = state.best
        for neighbour in _neighbours(start, active):
            if state.is_over:
                return
            state.judge(neighbour)
            if state.best is not best:
                # The rest of these neighbours are left out: those of the better one come first.
                break


def _neighbours(resident: frozenset[int], active: Sequence[int]) -> Iterator[frozenset[int]]:
    """Sets that differ by one group, or by an exchange; exchanges close in the order come first."""
    for group in active:
        if group not in resident:
            yield resident | {group}
    for distance in range(1, len(active)):
        for first, second in zip(active, active[distance:], strict=False):
            if (first in resident) != (second in resident):
                yield resident ^ {first, second}
    for group in active:
        if group in resident:
            yield resident - {group}
