"""The order in which groups were last acquired, and what it predicts; a hint, never a promise.

Promises: a prediction follows the step last seen and wraps from its last group to its first; any
other order is accepted and recorded, and the prediction catches on again at the next group that it
knows. Keys are any hashable: group indices within a component, or component names within a
pipeline. No torch, no clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class StepOrder(Generic[Key]):
    """Records one step's acquisitions while it predicts them from the step before.

    Acquiring a key again directly after itself is one position: the group has not been left.
    `max_length` bounds what one step may record; what goes beyond is run but not remembered.
    """

    def __init__(self, max_length: int = 100_000) -> None:
        self._max_length = max_length
        self._known: tuple[Key, ...] = ()
        self._places: dict[Key, tuple[int, ...]] = {}
        self._seen: list[Key] = []
        self._next = 0

    @property
    def known(self) -> tuple[Key, ...]:
        """The order of the last finished step; empty before the first."""
        return self._known

    @property
    def recorded_length(self) -> int:
        """How many positions the step under way has had so far."""
        return len(self._seen)

    @property
    def remaining(self) -> int:
        """How many positions of the known order are still ahead of this step."""
        return max(0, len(self._known) - self._next)

    def begin(self) -> None:
        """Start a step, dropping what an unfinished one recorded."""
        self._seen = []
        self._next = 0

    def acquire(self, key: Key) -> bool:
        """Record an acquisition; says whether it was the one predicted."""
        if self._seen and self._seen[-1] == key:
            return True
        if len(self._seen) < self._max_length:
            self._seen.append(key)
        if self._next < len(self._known) and self._known[self._next] == key:
            self._next += 1
            return True
        self._resynchronise(key)
        return False

    def finish(self) -> bool:
        """End a step, which becomes the known order; says whether it was the same as before."""
        seen = tuple(self._seen)
        same = seen == self._known
        if seen and not same:
            self._know(seen)
        self.begin()
        return same

    def upcoming(self, count: int) -> tuple[Key, ...]:
        """The next `count` keys after the last one acquired, wrapping round the step's border."""
        if not self._known:
            return ()
        return tuple(islice(self._from(self._next), count))

    def _from(self, position: int) -> Iterator[Key]:
        length = len(self._known)
        while True:
            yield self._known[position % length]
            position += 1

    def _know(self, seen: tuple[Key, ...]) -> None:
        self._known = seen
        places: dict[Key, list[int]] = {}
        for position, key in enumerate(seen):
            places.setdefault(key, []).append(position)
        self._places = {key: tuple(found) for key, found in places.items()}

    def _resynchronise(self, key: Key) -> None:
        """Go on after the key's next known position, the first of the step if none is ahead."""
        places = self._places.get(key)
        if places is None:
            return
        self._next = next((place for place in places if place >= self._next), places[0]) + 1
