"""Where in a component's known order one member of a sweep stands; pure.

Promises: members that do the same have equal places at equal groups, so that waiting for the lowest
place brings them together; whoever leaves groups out is ahead of those that do not, and whoever
goes back in the order stands behind again.
"""

from __future__ import annotations

from collections.abc import Sequence

Place = tuple[int, int]
"""An index in the known order, and how many groups that the order does not have came since."""

ENTRY: Place = (-1, 0)
"""The entry of a root's forward, before all groups."""


class PlaceCursor:
    """Follows one member's acquisitions through `known`, the order of the last whole step.

    A group called again directly after itself is one place, as it is in `order`.
    """

    def __init__(self, known: Sequence[int] = ()) -> None:
        self.place = ENTRY
        self._known = known
        self._latest: int | None = None

    def acquire(self, group: int) -> Place:
        """The place at which the member needs a group now."""
        if group != self._latest:
            self._latest = group
            self.place = self._place_of(group)
        return self.place

    def _place_of(self, group: int) -> Place:
        index, unknown = self.place
        known = self._known
        for found in (*range(index + 1, len(known)), *range(index + 1)):
            if known[found] == group:
                return found, 0
        return index, unknown + 1
