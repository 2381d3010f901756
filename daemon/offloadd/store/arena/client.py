"""Where a worker gets a component's weights in host memory: `ArenaClient.open`.

Memory belongs to the control plane; what was read once is there for the next opening, in this
process or in the one after it, and is checked before it is used again. Whatever has no room in the
host budget rests on disk, and comes back by `ArenaSource.gather` when there is room.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from offloadd.channel.arena import (
    ArenaOrder,
    CloseExtent,
    ExtentOpened,
    ExtentUsed,
    Recall,
    Recalled,
    StoreReport,
)
from offloadd.store.arena.filling import OnBytes, Progress
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
from offloadd.store.arena.opening import Opener
from offloadd.store.arena.source import ArenaSource, LateFiles, Wish
from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import Layout
from offloadd.store.read_meter import ReadMeter
from offloadd.store.reader import DiskReader


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
        self._meters: WeakValueDictionary[str, ReadMeter] = WeakValueDictionary()
        self._keeper = Keeper(self._holdings, self._read)
        self._opener = Opener(self._holdings, self._keeper)
        self._key_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

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

    def tell_wanted(self, on_wanted: Callable[[frozenset[str]], None]) -> None:
        """From now on, tell whose memory is wanted elsewhere while views of it are held.

        `on_wanted` gets owners (`MODEL/COMPONENT`) in a thread that must not be held up. Memory
        goes as soon as its views have gone; where these stay, `refuse` says so.
        """
        self._keeper.on_wanted = on_wanted

    def refuse(self, owners: Collection[str]) -> None:
        """These owners keep their memory for now, whoever wants it."""
        self._keeper.refuse(owners)

    def open(
        self,
        index: CheckpointIndex,
        layout: Layout,
        *,
        owner: str = "",
        names: Mapping[str, str] | None = None,
        origin: tuple[Path, CheckpointIndex] | None = None,
        on_bytes: OnBytes = lambda done, total: None,
    ) -> ArenaSource:
        """The weights of one component, in memory as far as there is room; close it when done.

        `layout` says what the bytes are to be, dtypes included; they must be those of the files.
        `owner` is `MODEL/COMPONENT`, for the accounts; `names` gives the checkpoint's name of a
        tensor where it differs from the layout's. `origin` is another place with the index of what
        the bytes were made from, to be recalled too. Files are opened only when bytes of them are
        needed. Raises `ModelLoadFailed` where the files do not fit the layout, `StorageFailed`,
        `OutOfMemory`, and whatever `on_bytes` raises; then nothing is kept of what was not whole.
        """
        key = extent_key(index, layout, names)
        indexes = {place_of(index.location, index.variant): pack_index(index)}
        if origin is not None:
            directory, first = origin
            indexes[place_of(directory, first.variant)] = pack_index(first)
        files = LateFiles(index, layout, self._reader, names, self.meter(owner))
        wish = Wish(owner, files, indexes)
        with self._key_locks[key], self._opening(key, layout, owner) as extent:
            self._opener.fetch(extent, wish, Progress(layout.size_bytes, on_bytes))
        return ArenaSource(layout, extent, wish, self)

    def meter(self, owner: str) -> ReadMeter:
        """Counts what is read from disk for an owner; reported as long as somebody holds it."""
        with self._holdings.lock:
            meter = self._meters.get(owner)
            if meter is None:
                meter = self._meters[owner] = ReadMeter(self._keeper.report_later)
            return meter

    def recall(self, location: Path, variant: str | None = None) -> CheckpointIndex | None:
        """The index of weights that are in memory, by what was indexed; its files may be gone."""
        request, answer = self._opener.requests.new()
        self._send(Recall(request=request, place=place_of(location, variant)))
        index = answer.result()
        try:
            return unpack_index(index) if index else None
        except msgspec.DecodeError:
            return None

    def handle(self, order: ArenaOrder, descriptors: Sequence[int]) -> None:
        """Take what the control plane says; never blocks. The descriptors are the arena's now."""
        match order:
            case ExtentOpened(segments=segments):
                for segment in segments:
                    self._holdings.received(segment.number)
                self._opener.requests.opened(order, descriptors)
            case Recalled():
                self._opener.requests.recalled(order)
            case _:
                self._keeper.ask(order, descriptors)

    def close(self) -> None:
        """End the threads; sources must have been closed. The reader is not closed."""
        self._keeper.stop()
        self._opener.close()

    # --- for sources ----------------------------------------------------------------------------

    def using(self, extent: Extent) -> AbstractContextManager[None]:
        """Keep an extent's segments where they are for the time of a `with` block."""
        return self._holdings.using(extent)

    def used(self, extent: Extent) -> None:
        """Say that an extent is in use now."""
        self._send(ExtentUsed(key=extent.key))

    def gather(self, extent: Extent, wish: Wish, on_bytes: OnBytes) -> None:
        """Bring back what of an open extent is not in memory, as far as there is room now."""
        total_bytes = sum(extent.sizes)
        with self._key_locks[extent.key], self._whole_or_not_there(extent):
            self._opener.fetch(extent, wish, Progress(total_bytes, on_bytes))

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
            with self._whole_or_not_there(extent):
                yield extent
            is_open = True
        finally:
            if not is_open:
                self._disown(extent, owner)

    @contextmanager
    def _whole_or_not_there(self, extent: Extent) -> Iterator[None]:
        try:
            with self._holdings.using(extent):
                yield
        finally:
            # What is half there must not be taken for weights, by nobody.
            if extent.unproven:
                self._holdings.vacate(extent, sorted(extent.unproven))

    def _read(self) -> StoreReport:
        with self._holdings.lock:
            read = {owner: meter.reading() for owner, meter in self._meters.items()}
        return StoreReport(disk_read_bytes=self._reader.read_bytes_total, read=read)

    def _disown(self, extent: Extent, owner: str) -> None:
        with self._holdings.lock:
            extent.owners[owner] -= 1
            is_last = extent.owners[owner] <= 0
            if is_last:
                del extent.owners[owner]
        self._holdings.settle(extent)
        if is_last:
            self._send(CloseExtent(key=extent.key, owner=owner))
