"""Gets an extent's segments from the control plane and the right bytes into them.

Promises: what was not whole when an opening ends is kept by nobody. What memory has is checked, or
was checked by this process before; only what it has not is read from the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from offloadd.channel.arena import OpenExtent, Segment, SegmentDamaged, SegmentFilled
from offloadd.store.arena.filling import Progress, fill, find_damaged
from offloadd.store.arena.holdings import Extent, Holdings
from offloadd.store.arena.keeper import Keeper
from offloadd.store.arena.requests import Granted, Requests
from offloadd.store.arena.source import Wish

LOOK_EVERY_S = 0.2
"""How often an opening that waits for memory asks whether it is to stop."""


class Opener:
    """Carries openings out; one for each process."""

    def __init__(self, holdings: Holdings, keeper: Keeper) -> None:
        self.requests = Requests(self._return)
        self._holdings = holdings
        self._keeper = keeper
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "arena-check")

    def fetch(self, extent: Extent, wish: Wish, progress: Progress) -> None:
        """Bring into memory what of an extent is not there and has room.

        Raises what the files' reads fail with, and what the progress's listener raises.
        """
        while self._fetch(extent, wish, progress):
            progress.done_bytes = 0

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _fetch(self, extent: Extent, wish: Wish, progress: Progress) -> bool:
        """True if some segments were damaged, to be asked for anew."""
        request, answer = self.requests.new()
        self._holdings.send(
            OpenExtent(
                request=request,
                key=extent.key,
                sizes=list(extent.sizes),
                owner=wish.owner,
                indexes=wish.indexes,
            )
        )
        fresh = self._install(extent, self._wait(request, answer, progress))
        damaged = find_damaged(extent, self._unknown(fresh), self._pool, progress)
        found = [one.piece for one in fresh if one.checksum is not None]
        self._holdings.prove(extent, [piece for piece in found if piece not in damaged])
        if damaged:
            self._reject(extent, damaged)
            return True
        empty = {one.piece: one.number for one in fresh if one.checksum is None}
        if empty:
            fill(extent, sorted(empty), wish.files.get(), self._filled(extent, empty), progress)
            self._keeper.report_later()
        self._keeper.pin_later(extent, found)
        return False

    def _filled(self, extent: Extent, numbers: dict[int, int]) -> Callable[[int, bytes], None]:
        def filled(piece: int, checksum: bytes) -> None:
            self._holdings.prove(extent, [piece])
            self._holdings.send(SegmentFilled(number=numbers[piece], checksum=checksum))

        return filled

    def _wait(self, request: int, answer: Future[Any], progress: Progress) -> list[Granted]:
        is_done = False
        try:
            while True:
                try:
                    granted: list[Granted] = answer.result(LOOK_EVERY_S)
                    is_done = True
                    return granted
                except NotYet:
                    progress.look()
        finally:
            if not is_done:
                self.requests.give_up(request, answer)

    def _install(self, extent: Extent, granted: list[Granted]) -> list[Segment]:
        """Map segments where nothing is mapped yet; gives those.

        What is mapped already stays: it may be a segment's twin, which the answer did not know of.
        """
        fresh: list[Segment] = []
        with self._holdings.mapping_lock, self._holdings.lock:
            for segment, descriptor in granted:
                if extent.numbers[segment.piece] is None:
                    self._map(extent, segment, descriptor)
                    fresh.append(segment)
        self._return(granted)
        return fresh

    def _map(self, extent: Extent, segment: Segment, descriptor: int) -> None:
        piece = segment.piece
        # Drivers page-lock only what may be written to; it is made read-only after that.
        writable = segment.checksum is None or self._keeper.pins
        extent.memory.place(
            extent.offsets[piece], extent.sizes[piece], descriptor, writable=writable
        )
        extent.numbers[piece] = segment.number
        extent.unproven.add(piece)

    def _unknown(self, fresh: list[Segment]) -> list[tuple[int, bytes]]:
        """The pieces, with their checksums, whose bytes this process has not seen to be right."""
        with self._holdings.lock:
            return [
                (one.piece, one.checksum)
                for one in fresh
                if one.checksum is not None and one.number not in self._holdings.verified
            ]

    def _reject(self, extent: Extent, damaged: list[int]) -> None:
        for piece in damaged:
            number = extent.numbers[piece]
            assert number is not None
            self._holdings.send(SegmentDamaged(number=number))
        self._holdings.vacate(extent, damaged)

    def _return(self, granted: list[Granted]) -> None:
        """Close descriptors; segments that are mapped nowhere are given back."""
        for _, descriptor in granted:
            os.close(descriptor)
        self._holdings.give_back(segment.number for segment, _ in granted)
