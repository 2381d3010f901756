"""How components follow each other on a device, and what the ring must be for all that take turns.

A component takes turns with those that have run since its own step before: in a pipeline that draws
one picture after the other, each with all the others. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from offloadd.offload.streaming.streamed import StreamedComponent
from offloadd.store.layout import align

ENOUGH_SLOTS = 2
"""How many of its largest groups a component finds room for in a ring that was made for others: one
comes while one is computed with."""

LONG_TURN_STEPS = 4
"""From so many steps in a row on, a component's own plan decides about the ring: what a change of
the ring costs, once in a turn, counts for little."""


class Turns:
    """Counts the steps of all components together."""

    def __init__(self) -> None:
        self._steps = 0
        self._latest: StreamedComponent | None = None

    def step(self, component: StreamedComponent) -> None:
        """A step of the component begins."""
        if component is not self._latest:
            if self._latest is not None:
                self._latest.turn_steps = self._latest.turn_steps_so_far
            component.turn_before = component.last_step
            component.turn_steps_so_far = 0
            self._latest = component
        self._steps += 1
        component.turn_steps_so_far += 1
        component.step_before, component.last_step = component.last_step, self._steps


def is_wanted_sooner(one: StreamedComponent, other: StreamedComponent, *, runs: bool) -> bool:
    """Whether `one` has run since the other's step before, and so is expected again before it.

    While the other one runs, the step that is under way is not the one before.
    """
    return one.last_step > (other.step_before if runs else other.last_step)


def common_ring_bytes(
    latest: StreamedComponent,
    sharing: Iterable[StreamedComponent],
    most_bytes: int,
    alignment_bytes: int,
) -> int:
    """The ring for `latest`, which runs, and those of `sharing` that take turns with it.

    As large as those ask for whose turns are long; others make do with it where it holds two of
    their groups: also of those that are to stay, if ring and residents are not all within
    `most_bytes`. One whose turns are long and that needs no ring has none.
    """
    if _is_long(latest) and not latest.ring_bytes:
        return 0
    turns = [
        one
        for one in sharing
        if one is latest
        or (one.last_step > latest.turn_before and (one.ring_bytes or not _is_long(one)))
    ]
    if len(turns) == 1:
        return latest.ring_bytes
    common = max(one.ring_bytes for one in [one for one in turns if _is_long(one)] or turns)
    all_fit = common + sum(one.kept_bytes for one in turns) <= most_bytes
    largest = max(one.largest_bytes(passing=all_fit) for one in turns)
    wanted = ENOUGH_SLOTS * align(largest, alignment_bytes)
    return max(common, min(wanted, most_bytes))


def _is_long(one: StreamedComponent) -> bool:
    """Whether its last turn was, or is so far; before the first it counts as long."""
    steps = max(one.turn_steps, one.turn_steps_so_far)
    return not one.turn_steps or steps >= LONG_TURN_STEPS
