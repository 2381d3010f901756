"""Where a worker gets a component's weights in host memory: `ArenaClient.open`.

Memory belongs to the control plane; what was read once is there for the next opening, in this
process or in the one after it, and is checked before it is used again. Whatever has no room in the
host budget rests on disk.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from offloadd.channel.arena import (
    ArenaOrder,
    CloseExtent,
    ExtentOpened,
    ExtentUsed,
    OpenExtent,
    Recall,
    Recalled,
    Segment,
    SegmentDamaged,
    SegmentFilled,
)
from offloadd.store.arena.filling import OnBytes, Progress, fill, find_damaged
from offloadd.store.arena.holdings import Extent, Holdings, Send
from offloadd.store.arena.keeper import Keeper, Pin
from offloadd.store.arena.key import (
    PIECE_BYTES,
    extent_key,
    pack_index,
    piece_sizes,
    place_of,
    unpack_index,
)
from offloadd.store.arena.source import ArenaSource, LateFiles
from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import Layout
from offloadd.store.reader import DiskReader

LOOK_EVERY_S = 0.2
"""How often an opening that waits for memory asks whether it is to stop."""

_Granted = tuple[Segment, int]


class ArenaClient:
    """One for each process; every method may be called from any thread.

    `handle` is to be given every `ArenaOrder` that comes in answer to what `send` says.
    """

    def __init__(
        self,
        reader: DiskReader,
        send: Send,
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`piece_bytes` is a multiple of the page size and the same in all processes."""
        self._reader = reader
        self._send = send
        self._piece_bytes = piece_bytes
        self._holdings = Holdings(send)
        self._keeper = Keeper(self._holdings, lambda: reader.read_bytes_total)
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 8), "arena-check")
        self._lock = threading.Lock()
        self._key_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._requests = 0
        self._answers: dict[int, Future[Any]] = {}
        self._granted: defaultdict[int, list[_Granted]] = defaultdict(list)

    @classmethod
    def alone(cls, reader: DiskReader, **options: Any) -> ArenaClient:
        """A client without a control plane: its memory is its own, unlimited, and ends with it."""
        from offloadd.store.arena.alone import Alone

        alone = Alone()
        client = cls(reader, alone.send, **options)
        alone.answer = client.handle
        return client

    def use_pin(self, pin: Pin) -> None:
        """From now on, before the first opening, page-lock memory in the background.

        `pin` is the `pin` of an `Accelerator` that has DMA.
        """
        self._keeper.pin = pin

    def open(
        self,
        index: CheckpointIndex,
        layout: Layout,
        *,
        owner: str = "",
        names: Mapping[str, str] | None = None,
        on_bytes: OnBytes = lambda done, total: None,
    ) -> ArenaSource:
        """The weights of one component, in memory as far as there is room; close it when done.

        `layout` says what the bytes are to be, dtypes included; they must be those of the files.
        `owner` is `MODEL/COMPONENT`, for the accounts; `names` gives the checkpoint's name of a
        tensor where it differs from the layout's. Files are opened only when bytes of them are
        needed. Raises `ModelLoadFailed` where the files do not fit the layout, `StorageFailed`,
        `OutOfMemory`, and whatever `on_bytes` raises; then nothing is kept of what was not whole.
        """
        key = extent_key(index, layout, names)
        files = LateFiles(index, layout, self._reader, names)
        with self._key_locks[key], self._opening(key, layout, owner) as extent:
            progress = Progress(layout.size_bytes, on_bytes)
            about = (place_of(index.location, index.variant), pack_index(index))
            while self._fetch(extent, owner, about, files, progress):
                progress.done_bytes = 0
        return ArenaSource(layout, extent, files, self, owner)

    def recall(self, location: Path, variant: str | None = None) -> CheckpointIndex | None:
        """The index of weights that are in memory, by what was indexed; its files may be gone."""
        request, answer = self._new_request()
        self._send(Recall(request=request, place=place_of(location, variant)))
        about = answer.result()
        try:
            return unpack_index(about) if about else None
        except msgspec.DecodeError:
            return None

    def handle(self, order: ArenaOrder, descriptors: Sequence[int]) -> None:
        """Take what the control plane says; never blocks. The descriptors are the arena's now."""
        match order:
            case ExtentOpened(request=request, segments=segments):
                with self._lock:
                    self._granted[request] += zip(segments, descriptors, strict=True)
                    if order.more:
                        return
                    granted = self._granted.pop(request)
                    answer = self._answers.pop(request, None)
                for segment, _ in granted:
                    self._holdings.received(segment.number)
                if answer is not None:
                    answer.set_result(granted)
                else:
                    self._return(granted)
            case Recalled(request=request, about=about):
                with self._lock:
                    answer = self._answers.pop(request)
                answer.set_result(about)
            case _:
                self._keeper.ask(order, descriptors)

    def close(self) -> None:
        """End the threads; sources must have been closed. The reader is not closed."""
        self._keeper.stop()
        self._pool.shutdown()

    # --- for sources ----------------------------------------------------------------------------

    def using(self, extent: Extent) -> AbstractContextManager[None]:
        """Keep an extent's segments where they are for the time of a `with` block."""
        return self._holdings.using(extent)

    def used(self, extent: Extent) -> None:
        """Say that an extent is in use now."""
        self._send(ExtentUsed(key=extent.key))

    def was_read(self) -> None:
        """Say that bytes were read from disk."""
        self._keeper.report_later()

    def let_go(self, extent: Extent, owner: str) -> None:
        """An owner's source was closed; memory that nobody uses is given back before it returns."""
        with self._key_locks[extent.key]:
            self._disown(extent, owner)

    # --- opening --------------------------------------------------------------------------------

    @contextmanager
    def _opening(self, key: str, layout: Layout, owner: str) -> Iterator[Extent]:
        with self._holdings.lock:
            extent = self._holdings.extents.get(key)
            if extent is None:
                sizes = piece_sizes(layout.size_bytes, self._piece_bytes)
                extent = Extent(key, sizes, lambda: self._keeper.settle_later(key))
                self._holdings.extents[key] = extent
            extent.owners[owner] += 1
        is_open = False
        try:
            with self._holdings.using(extent):
                yield extent
            is_open = True
        finally:
            if not is_open:
                # What is half there must not be taken for weights, by nobody.
                self._holdings.vacate(extent, sorted(extent.unproven))
                self._disown(extent, owner)

    def _fetch(
        self,
        extent: Extent,
        owner: str,
        about: tuple[str, bytes],
        files: LateFiles,
        progress: Progress,
    ) -> bool:
        """Get an extent's segments and their bytes; True if some were damaged, to be asked anew."""
        request, answer = self._new_request()
        place, index = about
        sizes = list(extent.sizes)
        self._send(
            OpenExtent(
                request=request,
                key=extent.key,
                sizes=sizes,
                owner=owner,
                place=place,
                about=index,
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

        def filled(piece: int, checksum: bytes) -> None:
            self._holdings.prove(extent, [piece])
            self._send(SegmentFilled(number=empty[piece], checksum=checksum))

        if empty:
            fill(extent, sorted(empty), files.get(), filled, progress)
            self.was_read()
        self._keeper.pin_later(extent, found)
        return False

    def _wait(self, request: int, answer: Future[Any], progress: Progress) -> list[_Granted]:
        is_done = False
        try:
            while True:
                try:
                    granted: list[_Granted] = answer.result(LOOK_EVERY_S)
                    is_done = True
                    return granted
                except NotYet:
                    progress.look()
        finally:
            if not is_done:
                self._abandon(request, answer)

    def _abandon(self, request: int, answer: Future[Any]) -> None:
        with self._lock:
            is_pending = self._answers.pop(request, None) is not None
        if not is_pending:
            self._return(answer.result())

    def _install(self, extent: Extent, granted: list[_Granted]) -> list[Segment]:
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
            self._send(SegmentDamaged(number=number))
        self._holdings.vacate(extent, damaged)

    def _disown(self, extent: Extent, owner: str) -> None:
        with self._holdings.lock:
            extent.owners[owner] -= 1
            is_last = extent.owners[owner] <= 0
            if is_last:
                del extent.owners[owner]
        self._holdings.settle(extent)
        if is_last:
            self._send(CloseExtent(key=extent.key, owner=owner))

    def _return(self, granted: list[_Granted]) -> None:
        """Close descriptors; segments that are mapped nowhere are given back."""
        for _, descriptor in granted:
            os.close(descriptor)
        self._holdings.give_back(segment.number for segment, _ in granted)

    def _new_request(self) -> tuple[int, Future[Any]]:
        with self._lock:
            self._requests += 1
            answer: Future[Any] = Future()
            self._answers[self._requests] = answer
            return self._requests, answer
