"""What this process has of the arena: extents, the segments mapped in them, who uses them.

Invariants: a segment is vacated only while nobody uses its extent, under `mapping_lock`; each
descriptor that the control plane sent is given back exactly once, when the segment is mapped
nowhere here any more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from offloadd.channel.arena import SegmentsPinned, SegmentsReleased
from offloadd.channel.base import FromWorker
from offloadd.store.arena.reservation import Reservation

Send = Callable[[FromWorker], None]


class Extent:
    """One extent here. Its fields are changed under `Holdings.lock`."""

    def __init__(self, key: str, sizes: Sequence[int], on_last_view: Callable[[], None]) -> None:
        self.key = key
        self.sizes = tuple(sizes)
        self.offsets = tuple(sum(self.sizes[:piece]) for piece in range(len(self.sizes)))
        self.memory = Reservation(sum(self.sizes), on_last_view)
        self.numbers: list[int | None] = [None] * len(self.sizes)
        self.unproven: set[int] = set()
        """Mapped pieces whose bytes are still being read or checked: nobody may use them."""
        self.owners: Counter[str] = Counter()
        self.users = 0
        """Openings and copies that are under way."""
        self.unpins: dict[int, Callable[[], None]] = {}

    @property
    def is_used(self) -> bool:
        return self.users > 0 or self.memory.has_views

    @property
    def is_whole(self) -> bool:
        """Whether every piece is in memory."""
        return all(self.has(piece) for piece in range(len(self.sizes)))

    def has(self, piece: int) -> bool:
        """Whether a piece is in memory and right."""
        return self.numbers[piece] is not None and piece not in self.unproven

    def bytes_of(self, piece: int) -> memoryview:
        """A piece's bytes, for the store's own use."""
        start = self.offsets[piece]
        return self.memory.writable(start, start + self.sizes[piece])

    def pieces_of(self, number: int) -> list[int]:
        return [piece for piece, held in enumerate(self.numbers) if held == number]


class Holdings:
    """All extents of this process."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.lock = threading.RLock()
        self.mapping_lock = threading.RLock()
        """Held while segments are page-locked, compared or vacated; taken before `lock`."""
        self.extents: dict[str, Extent] = {}
        self.verified: set[int] = set()
        """Segments whose bytes this process has read from disk or checked."""
        self._received: Counter[int] = Counter()

    def received(self, number: int) -> None:
        """A descriptor of a segment has come."""
        with self.lock:
            self._received[number] += 1

    def holds(self, number: int) -> bool:
        """Whether a descriptor of a segment came and was not given back."""
        with self.lock:
            return number in self._received

    def prove(self, extent: Extent, pieces: Iterable[int]) -> None:
        """The bytes of these pieces are known to be right."""
        with self.lock:
            for piece in pieces:
                number = extent.numbers[piece]
                if number is not None:
                    self.verified.add(number)
                    extent.unproven.discard(piece)

    @contextmanager
    def using(self, extent: Extent) -> Iterator[None]:
        """Keep an extent's segments mapped for the time of a `with` block."""
        with self.lock:
            extent.users += 1
        try:
            yield
        finally:
            with self.lock:
                extent.users -= 1
                is_forsaken = not extent.owners and not extent.is_used
            if is_forsaken:
                self.settle(extent)

    def with_number(self, number: int) -> list[Extent]:
        """The extents that a segment is mapped in."""
        return [one for one in self.extents.values() if number in one.numbers]

    def vacate(self, extent: Extent, pieces: Iterable[int]) -> None:
        """Unmap pieces of an extent that nobody uses, and give back what is mapped nowhere now."""
        with self.mapping_lock, self.lock:
            gone: list[int] = []
            for piece in pieces:
                number = extent.numbers[piece]
                if number is None:
                    continue
                self._unpin(extent, piece)
                extent.memory.vacate(extent.offsets[piece], extent.sizes[piece])
                extent.numbers[piece] = None
                extent.unproven.discard(piece)
                gone.append(number)
            self.give_back(gone)

    def give_back(self, numbers: Iterable[int]) -> None:
        """Return the descriptors of those of these segments that are mapped nowhere."""
        with self.lock:
            returned: list[int] = []
            for number in set(numbers):
                if not self.with_number(number):
                    returned += [number] * self._received.pop(number, 0)
                    self.verified.discard(number)
            if returned:
                self.send(SegmentsReleased(numbers=returned))

    def settle(self, extent: Extent) -> None:
        """Let an extent go that has no owner and no user any more."""
        with self.mapping_lock, self.lock:
            if extent.owners or extent.is_used or self.extents.get(extent.key) is not extent:
                return
            self.vacate(extent, range(len(extent.sizes)))
            del self.extents[extent.key]

    def _unpin(self, extent: Extent, piece: int) -> None:
        undo = extent.unpins.pop(piece, None)
        number = extent.numbers[piece]
        if undo is None or number is None:
            return
        undo()
        is_pinned = any(
            other in one.unpins
            for one in self.with_number(number)
            for other in one.pieces_of(number)
        )
        if not is_pinned:
            self.send(SegmentsPinned(numbers=[number], pinned=False))
