"""Which bytes of the device's ring buffer each streamed group may use: arithmetic only, no device.

Promises: live places never overlap, never leave the buffer, start on an aligned offset and are
contiguous. A place is looked for from where the last one ended, round the buffer once, so that
places follow each other in the order in which groups will be computed; a tail too short for the
next group is skipped and used by a later, smaller one. Whatever is free as one piece is found: when
no place is live, any group that is not larger than the buffer fits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

from offloadd.store.layout import align


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The bytes `start_bytes` (aligned) up to `stop_bytes` (not included) of a ring."""

    start_bytes: int
    stop_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    def overlaps(self, other: Place) -> bool:
        """Whether any byte belongs to both."""
        return self.start_bytes < other.stop_bytes and other.start_bytes < self.stop_bytes


class Ring:
    """The live places of a circular buffer of `capacity_bytes`, each at a multiple of alignment."""

    def __init__(self, capacity_bytes: int, alignment_bytes: int) -> None:
        if capacity_bytes < 0 or alignment_bytes < 1:
            raise ValueError(f"no ring has {capacity_bytes=} and {alignment_bytes=}")
        self.capacity_bytes = capacity_bytes
        self.alignment_bytes = alignment_bytes
        self._live: list[Place] = []
        self._cursor_bytes = 0

    @property
    def live(self) -> tuple[Place, ...]:
        """Live places by where they start."""
        return tuple(self._live)

    def allocate(self, size_bytes: int) -> Place | None:
        """The next free place of that size, now live; None while live places are in the way.

        Raises ValueError for a size that this ring can never hold.
        """
        if not 0 < size_bytes <= self.capacity_bytes:
            raise ValueError(f"{size_bytes} bytes never fit a ring of {self.capacity_bytes} bytes")
        start = self._find(size_bytes)
        if start is None:
            return None
        place = Place(start, start + size_bytes)
        insort(self._live, place)
        self._cursor_bytes = align(place.stop_bytes, self.alignment_bytes)
        return place

    def release(self, place: Place) -> None:
        """End a place's life; raises ValueError if it is not live."""
        index = bisect_left(self._live, place)
        if index == len(self._live) or self._live[index] != place:
            raise ValueError(f"{place} is not live")
        del self._live[index]

    def _find(self, size_bytes: int) -> int | None:
        """Where the first gap that holds `size_bytes` begins, looking from the cursor onwards."""
        live = self._live
        start = self._cursor_bytes
        first = bisect_right(live, Place(start, start)) if live else 0
        if first and live[first - 1].stop_bytes > start:
            start = align(live[first - 1].stop_bytes, self.alignment_bytes)
        for following in live[first:]:
            if start + size_bytes <= following.start_bytes:
                return start
            start = align(following.stop_bytes, self.alignment_bytes)
        if start + size_bytes <= self.capacity_bytes:
            return start
        start = 0
        for following in live:
            if start + size_bytes <= following.start_bytes:
                return start
            start = align(following.stop_bytes, self.alignment_bytes)
        # With nothing live, the second round has found the whole buffer from its first byte.
        return start if start + size_bytes <= self.capacity_bytes else None
