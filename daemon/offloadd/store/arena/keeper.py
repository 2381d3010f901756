"""The thread that does what may take a while: page-locking, comparing, giving segments back.

What the control plane asks for goes before page-locking, so that memory comes back soon. A refusal
to page-lock is no error: those bytes are copied more slowly, a warning says so once, and their
number is reported.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from offload_protocol.errors import OutOfMemory
from offloadd.channel.arena import (
    CompareSegment,
    ReleaseSegments,
    SegmentAccepted,
    SegmentDiffers,
    SegmentMerged,
    SegmentsKept,
    SegmentsPinned,
    StoreReport,
)
from offloadd.channel.framing import ChannelClosed
from offloadd.store.arena.holdings import Extent, Holdings
from offloadd.store.arena.reservation import Reservation

REPORT_EVERY_S = 1.0

Pin = Callable[[memoryview], Callable[[], None] | None]
"""As `Accelerator.pin`: page-locks memory in place and gives the call that undoes it, or None."""

OnWanted = Callable[[frozenset[str]], None]
"""Told the owners of memory that is wanted elsewhere and of which views are held."""

KeeperOrder = SegmentAccepted | CompareSegment | ReleaseSegments

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    order: KeeperOrder
    descriptors: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Settle:
    key: str


class _Stop:
    pass


class Keeper:
    """One thread; `read` gives the report of what was read."""

    def __init__(self, holdings: Holdings, read: Callable[[], StoreReport]) -> None:
        self.pin: Pin | None = None
        self.on_wanted: OnWanted | None = None
        self._holdings = holdings
        self._read = read
        self._wanted: set[int] = set()
        """Segments that go when the last view of their extents has gone."""
        self._tasks: queue.SimpleQueue[_Asked | _Settle | _Stop | None] = queue.SimpleQueue()
        self._to_pin: deque[tuple[Extent, int]] = deque()
        self._refused_bytes = 0
        self._reported = StoreReport(disk_read_bytes=0)
        self._has_news = False
        self._thread = threading.Thread(target=self._run, name="arena-keeper", daemon=True)
        self._thread.start()

    @property
    def pins(self) -> bool:
        """Whether segments are to be page-locked."""
        return self.pin is not None

    def ask(self, order: KeeperOrder, descriptors: Sequence[int]) -> None:
        """Do what the control plane asks; the descriptors are the keeper's to close."""
        self._tasks.put(_Asked(order, descriptors))

    def settle_later(self, key: str) -> None:
        """Let an extent go if nobody needs it; may be called from a finaliser."""
        self._tasks.put(_Settle(key))

    def pin_later(self, extent: Extent, pieces: Sequence[int]) -> None:
        """Page-lock pieces of an extent in the background."""
        if self.pin is not None:
            self._to_pin.extend((extent, piece) for piece in pieces)
            self._tasks.put(None)

    def refuse(self, owners: Collection[str]) -> None:
        """What is wanted of these owners stays for now."""
        with self._holdings.lock:
            kept = [
                number
                for number in self._wanted
                if any(one.owners.keys() & owners for one in self._holdings.with_number(number))
            ]
            self._wanted.difference_update(kept)
        if kept:
            self._holdings.send(SegmentsKept(numbers=kept))

    def report_later(self) -> None:
        """Figures have changed."""
        if not self._has_news:
            self._has_news = True
            self._tasks.put(None)

    def stop(self) -> None:
        """End the thread after what it is doing."""
        self._tasks.put(_Stop())
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except ChannelClosed as reason:
            _log.debug("the arena ends with its channel: %s", reason)

    def _step(self) -> bool:
        try:
            # Between two pieces to page-lock, only what is there already is done first.
            task = self._tasks.get(timeout=self._wait_s())
        except queue.Empty:
            self._idle()
            return True
        match task:
            case _Stop():
                return False
            case _Settle(key=key):
                self._settle(key)
            case _Asked(order=order, descriptors=descriptors):
                try:
                    self._work_on(order, descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        return True

    def _wait_s(self) -> float | None:
        if self._to_pin:
            return 0.0
        return REPORT_EVERY_S if self._has_news else None

    def _idle(self) -> None:
        if self._to_pin:
            self._pin_piece(*self._to_pin.popleft())
        else:
            self._report()

    def _report(self) -> None:
        self._has_news = False
        report = msgspec.structs.replace(self._read(), refused_pin_bytes=self._refused_bytes)
        if report != self._reported:
            self._reported = report
            self._holdings.send(report)

    def _work_on(self, order: KeeperOrder, descriptors: Sequence[int]) -> None:
        match order:
            case ReleaseSegments(numbers=numbers):
                self._release(numbers)
            case SegmentAccepted(number=number):
                self._pin_number(number)
            case CompareSegment(number=number, twin=twin):
                self._holdings.received(twin)
                self._compare(number, twin, descriptors[0])

    def _settle(self, key: str) -> None:
        """The last view of an extent has gone: give back what nobody needs or others want."""
        holdings = self._holdings
        with holdings.mapping_lock, holdings.lock:
            extent = holdings.extents.get(key)
            if extent is None:
                return
            holdings.settle(extent)
            wanted = self._wanted.intersection(extent.numbers)
            self._wanted -= wanted
        if wanted:
            self._release(sorted(wanted))

    def _release(self, numbers: Sequence[int]) -> None:
        holdings = self._holdings
        kept: list[int] = []
        viewed: set[str] = set()
        with holdings.mapping_lock, holdings.lock:
            for number in numbers:
                extents = holdings.with_number(number)
                # One that is mapped nowhere is just being opened.
                is_busy = any(extent.users for extent in extents)
                if is_busy or (not extents and holdings.holds(number)):
                    kept.append(number)
                    continue
                owners = {name for one in extents if one.is_used for name in one.owners}
                if owners and self.on_wanted is not None:
                    self._wanted.add(number)
                    viewed |= owners
                elif any(extent.is_used for extent in extents):
                    kept.append(number)
                else:
                    for extent in extents:
                        holdings.vacate(extent, extent.pieces_of(number))
        if kept:
            holdings.send(SegmentsKept(numbers=kept))
        if viewed and self.on_wanted is not None:
            self.on_wanted(frozenset(viewed))

    # --- equal bytes ----------------------------------------------------------------------------

    def _compare(self, number: int, twin: int, descriptor: int) -> None:
        holdings = self._holdings
        with holdings.mapping_lock:
            with holdings.lock:
                places = [
                    (extent, piece)
                    for extent in holdings.with_number(number)
                    for piece in extent.pieces_of(number)
                ]
            same = bool(places) and self._is_same(*places[0], descriptor)
            if same:
                self._exchange(places, twin, descriptor)
            kind = SegmentMerged if same else SegmentDiffers
            holdings.send(kind(number=number, twin=twin))
            holdings.give_back([number, twin])
        self._pin_number(twin if same else number)

    def _is_same(self, extent: Extent, piece: int, descriptor: int) -> bool:
        size = extent.sizes[piece]
        try:
            other = Reservation(size)
            other.place(0, size, descriptor, writable=False)
        except OutOfMemory:
            return False
        return extent.memory.equals(extent.offsets[piece], size, other)

    def _exchange(self, places: list[tuple[Extent, int]], twin: int, descriptor: int) -> None:
        # One mapping replaces the other in one step, and the bytes are the same, so whoever reads
        # there meanwhile notices nothing. Nothing is page-locked yet: that comes after this.
        with self._holdings.lock:
            for extent, piece in places:
                size = extent.sizes[piece]
                extent.memory.place(extent.offsets[piece], size, descriptor, writable=self.pins)
                extent.numbers[piece] = twin
            self._holdings.verified.add(twin)

    # --- page-locking ---------------------------------------------------------------------------

    def _pin_number(self, number: int) -> None:
        with self._holdings.lock:
            for extent in self._holdings.with_number(number):
                self.pin_later(extent, extent.pieces_of(number))

    def _pin_piece(self, extent: Extent, piece: int) -> None:
        holdings = self._holdings
        with holdings.mapping_lock:
            number = extent.numbers[piece]
            if self.pin is None or number is None or piece in extent.unpins:
                return
            undo = self.pin(extent.bytes_of(piece))
            if undo is None:
                self._note_refusal(extent.sizes[piece])
                return
            with holdings.lock:
                extent.unpins[piece] = undo
            extent.memory.protect(extent.offsets[piece], extent.sizes[piece])
            holdings.send(SegmentsPinned(numbers=[number], pinned=True))

    def _note_refusal(self, size_bytes: int) -> None:
        if not self._refused_bytes:
            _log.warning(
                "weights could not be page-locked; copies to the device are slower. "
                "Check the locked-memory limit (ulimit -l) and other programs' use of it"
            )
        self._refused_bytes += size_bytes
        self.report_later()
