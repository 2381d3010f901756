"""An extent in host memory: one memfd of exact size, filled once from another source.

The simple form of the host tier: nothing is evicted and nothing is shared. Memory is returned when
the source was closed and the last view of it is gone, because whoever computes on a view must
never have it unmapped from under the computation.
"""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import Future, wait

from offload_protocol.errors import OutOfMemory, StorageFailed
from offloadd.store.layout import Layout
from offloadd.store.read_plan import ExtentRanges
from offloadd.store.source import WeightSource

PIECE_BYTES = 64 * 1024 * 1024


class HostSource:
    """A `WeightSource` whose extent is in memory; make one with `load`."""

    def __init__(self, layout: Layout, descriptor: int, view: memoryview) -> None:
        """`view` is a read-only mapping of the memfd `descriptor`, which this object now owns."""
        self._layout = layout
        self._ranges = ExtentRanges(layout)
        self._view: memoryview | None = view
        self._descriptor = descriptor
        self._close_descriptor = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def load(cls, source: WeightSource, *, piece_bytes: int = PIECE_BYTES) -> HostSource:
        """Read the whole extent, several pieces at a time; returns when it is all there.

        Alignment gaps are zero. Raises `OutOfMemory` when there is no room for it, and whatever
        `source.read` fails with; then nothing is kept.
        """
        size = source.layout.size_bytes
        descriptor = os.memfd_create("offloadd-extent", os.MFD_CLOEXEC)
        try:
            view = _mapped(descriptor, size)
        except OutOfMemory:
            os.close(descriptor)
            raise
        is_filled = False
        try:
            _fill(source, view, piece_bytes)
            is_filled = True
        finally:
            if not is_filled:
                # Not left to the garbage collector: the error's trace would keep it all.
                view.release()
                os.close(descriptor)
        return cls(source.layout, descriptor, view.toreadonly())

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def descriptor(self) -> int:
        """The memfd, for another process to map; valid until `close`."""
        return self._descriptor

    def host_view(self) -> memoryview | None:
        return self._open_view()

    def release_view(self) -> None:
        """Views are counted by their references here, so nothing has to be said."""

    def read(self, start_bytes: int, stop_bytes: int, into: memoryview) -> Future[int]:
        """Copy a range; done when it returns, with 0 bytes read from disk."""
        view = self._open_view()
        if into.nbytes != stop_bytes - start_bytes:
            raise ValueError(
                f"a range of {stop_bytes - start_bytes} bytes into {into.nbytes} bytes of memory"
            )
        for _, low, high in self._ranges.within(start_bytes, stop_bytes):
            into[low - start_bytes : high - start_bytes] = view[low:high]
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def close(self) -> None:
        """Let go of the memory; it is returned with the last view of it."""
        self._view = None
        self._close_descriptor()

    def _open_view(self) -> memoryview:
        if self._view is None:
            raise StorageFailed(
                "an extent in host memory was used after it was closed",
                hint="load the model again before it is used",
            )
        return self._view


def _mapped(descriptor: int, size_bytes: int) -> memoryview:
    if size_bytes == 0:
        return memoryview(bytearray())
    try:
        os.ftruncate(descriptor, size_bytes)
        return memoryview(mmap.mmap(descriptor, size_bytes))
    except OSError as error:
        raise OutOfMemory(
            f"no room for {size_bytes} bytes of weights in host memory: {error.strerror}",
            hint="unload a model, or let this one rest on disk",
            details={"size_bytes": size_bytes, "errno": error.errno},
        ) from error


def _fill(source: WeightSource, view: memoryview, piece_bytes: int) -> None:
    waiting: list[Future[int]] = []
    try:
        for start in range(0, len(view), piece_bytes):
            stop = min(start + piece_bytes, len(view))
            waiting.append(source.read(start, stop, view[start:stop]))
        for future in waiting:
            future.result()
    finally:
        # The memory must not go while a thread may still write into it.
        for future in waiting:
            future.cancel()
        wait(waiting)
