"""A component's weights in the host arena, as the offload engine sees them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from offload_protocol.errors import StorageFailed
from offloadd.store.arena.filling import OnBytes
from offloadd.store.arena.holdings import Extent
from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import Layout
from offloadd.store.read_meter import ReadMeter
from offloadd.store.read_plan import ExtentRanges
from offloadd.store.reader import DiskReader


class LateFiles:
    """A checkpoint's files, opened when they are first needed and not before."""

    def __init__(
        self,
        index: CheckpointIndex,
        layout: Layout,
        reader: DiskReader,
        names: Mapping[str, str] | None,
        meter: ReadMeter,
    ) -> None:
        self._open = partial(CheckpointSource, index, layout, reader, names=names, meter=meter)
        self._lock = threading.Lock()
        self._source: CheckpointSource | None = None

    def get(self) -> CheckpointSource:
        """The opened files. Raises what `CheckpointSource` raises."""
        with self._lock:
            if self._source is None:
                self._source = self._open()
            return self._source

    def close(self) -> None:
        """Let go of the files, if they were opened."""
        with self._lock:
            if self._source is not None:
                self._source.close()
                self._source = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants in memory: whose it is, where it is read from, how it is recalled."""

    owner: str
    files: LateFiles
    indexes: dict[str, bytes]


class Arena(Protocol):
    """What a source tells its client."""

    def using(self, extent: Extent) -> AbstractContextManager[None]: ...
    def used(self, extent: Extent) -> None: ...
    def gather(self, extent: Extent, wish: Wish, on_bytes: OnBytes) -> None: ...
    def let_go(self, extent: Extent, owner: str) -> None: ...


class ArenaSource:
    """A `WeightSource`; made by `ArenaClient.open`.

    Its memory may be taken back while nobody uses it: then `host_view` gives None, and `read` takes
    from memory what is there and from disk what is not.
    """

    def __init__(self, layout: Layout, extent: Extent, wish: Wish, arena: Arena) -> None:
        self._layout = layout
        self._extent = extent
        self._wish = wish
        self._arena = arena
        self._ranges = ExtentRanges(layout)
        self._lock = threading.Lock()
        self._is_open = True

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def host_bytes(self) -> int:
        """How much of the extent is in memory now."""
        sizes = enumerate(self._extent.sizes)
        return sum(size for piece, size in sizes if self._extent.has(piece))

    @property
    def is_whole(self) -> bool:
        """Whether all of the extent is in memory now."""
        return self._extent.is_whole

    def touch(self) -> None:
        """Say that the weights are in use now, so that others give way first."""
        self._arena.used(self._extent)

    def gather(self, on_bytes: OnBytes = lambda done, total: None) -> None:
        """Bring back what is not in memory, as far as there is room; what is colder gives way.

        Raises what `ArenaClient.open` raises; what is in memory then stays there.
        """
        with self._use():
            self._arena.gather(self._extent, self._wish, on_bytes)

    @property
    def pin_borders(self) -> tuple[int, ...]:
        """Offsets at which one page-locked piece ends and the next begins.

        A copy to a device is made of parts that do not cross one.
        """
        return self._extent.offsets[1:]

    def host_view(self) -> memoryview | None:
        """The whole extent in one read-only view, or None while a part of it rests on disk.

        Memory stays where it is for as long as the view or anything made from it lives.
        """
        extent = self._extent
        with self._use():
            view = extent.memory.view(self._layout.size_bytes) if extent.is_whole else None
        if view is not None:
            self.touch()
        return view

    def release_view(self) -> None:
        """Views are counted by their references here, so nothing has to be said."""

    def read(self, start_bytes: int, stop_bytes: int, into: memoryview) -> Future[int]:
        """See `WeightSource.read`; what is in memory has been copied when it returns."""
        if into.nbytes != stop_bytes - start_bytes:
            raise ValueError(
                f"a range of {stop_bytes - start_bytes} bytes into {into.nbytes} bytes of memory"
            )
        parts = self._ranges.within(start_bytes, stop_bytes)
        with self._use():
            missing = self._missing(start_bytes, stop_bytes)
            for _, low, high in parts:
                self._copy(low, high, into[low - start_bytes : high - start_bytes], missing)
        reads = [
            self._wish.files.get().read(low, high, into[low - start_bytes : high - start_bytes])
            for low, high in missing
        ]
        return _together(reads)

    def close(self) -> None:
        """Let go of the weights; unless a view lives on or others have them, their memory goes."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._wish.files.close()
            self._arena.let_go(self._extent, self._wish.owner)

    def _missing(self, start_bytes: int, stop_bytes: int) -> list[tuple[int, int]]:
        """The parts of a range that are not in memory, each as long as possible."""
        found: list[tuple[int, int]] = []
        extent = self._extent
        for piece, offset in enumerate(extent.offsets):
            low, high = max(offset, start_bytes), min(offset + extent.sizes[piece], stop_bytes)
            if low >= high or extent.has(piece):
                continue
            if found and found[-1][1] == low:
                low = found.pop()[0]
            found.append((low, high))
        return found

    def _copy(self, low: int, high: int, into: memoryview, missing: list[tuple[int, int]]) -> None:
        cursor = low
        for gap_low, gap_high in [*missing, (high, high)]:
            stop = min(max(gap_low, cursor), high)
            if stop > cursor:
                target = np.frombuffer(into, np.uint8).ctypes.data + cursor - low
                # Releases the interpreter lock, which a memoryview's own copy holds.
                ctypes.memmove(target, self._extent.memory.address + cursor, stop - cursor)
            cursor = min(max(cursor, gap_high), high)

    def _use(self) -> AbstractContextManager[None]:
        if not self._is_open:
            raise StorageFailed(
                "weights in host memory were used after they were closed",
                hint="load the model again before it is used",
            )
        return self._arena.using(self._extent)


def _together(reads: list[Future[int]]) -> Future[int]:
    """One future for several: their sum, or the first failure, when all of them are done."""
    if len(reads) == 1:
        return reads[0]
    whole: Future[int] = Future()
    # Whoever cancels and then waits must not unmap what a part is still writing to.
    whole.set_running_or_notify_cancel()
    left = len(reads)
    lock = threading.Lock()

    def one_is_done(_: Future[int]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            _complete(whole, reads)

    for read in reads:
        read.add_done_callback(one_is_done)
    if not reads:
        whole.set_result(0)
    return whole


def _complete(whole: Future[int], reads: list[Future[int]]) -> None:
    failures = [read.exception() for read in reads]
    failure = next((one for one in failures if one is not None), None)
    if failure is not None:
        whole.set_exception(failure)
    else:
        whole.set_result(sum(read.result() for read in reads))
