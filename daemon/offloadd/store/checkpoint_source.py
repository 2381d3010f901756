"""A component's weights served from the files they were downloaded as, without a second copy.

For checkpoints whose dtype is already right. A newer download beside an open source does not
change its numbers: it goes on reading the files that were indexed, and `stale_files` names them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from offload_protocol.errors import StorageFailed
from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import Layout
from offloadd.store.open_file import OpenFile, ReadCall
from offloadd.store.read_meter import ReadMeter
from offloadd.store.read_plan import ExtentMap
from offloadd.store.reader import DiskReader


class CheckpointSource:
    """A `WeightSource` whose extent rests on disk."""

    def __init__(
        self,
        index: CheckpointIndex,
        layout: Layout,
        reader: DiskReader,
        *,
        names: Mapping[str, str] | None = None,
        meter: ReadMeter | None = None,
        direct: bool = True,
        read_call: ReadCall = os.preadv,
    ) -> None:
        """Open every file that the layout needs.

        `names` gives the checkpoint's name of a tensor where it differs from the layout's; `meter`
        counts what is read;
        `direct=False` reads through the page cache. Raises `ModelLoadFailed` when a tensor is
        missing or has another shape or dtype, `StorageFailed` when a file is no longer the one
        that was indexed.
        """
        self._layout = layout
        self._map = ExtentMap(layout, index, names)
        self._reader = reader
        self._location = index.location
        self._meter = meter
        self._files: tuple[OpenFile, ...] | None = tuple(
            OpenFile(file, direct=direct, read_call=read_call) for file in index.files
        )

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def stale_files(self) -> tuple[Path, ...]:
        """Paths that now lead to another file or to none; the bytes served stay the old ones."""
        return tuple(file.path for file in self._files or () if file.is_stale)

    def host_view(self) -> memoryview | None:
        return None

    def release_view(self) -> None:
        """No view is ever handed out, so there is nothing to give back."""

    def read(
        self, start_bytes: int, stop_bytes: int, into: memoryview, *, urgent: bool = False
    ) -> Future[int]:
        """See `WeightSource.read`; `urgent` is for a range that the device already waits for."""
        if into.nbytes != stop_bytes - start_bytes:
            raise ValueError(
                f"a range of {stop_bytes - start_bytes} bytes into {into.nbytes} bytes of memory"
            )
        if self._files is None:
            refused: Future[int] = Future()
            refused.set_exception(
                StorageFailed(
                    f"{self._location} was closed", hint="load the model again before it is used"
                )
            )
            return refused
        segments = self._map.segments(start_bytes, stop_bytes)
        read = self._reader.read(self._files, segments, into, urgent=urgent)
        if self._meter is not None:
            self._meter.count(read)
        return read

    def close(self) -> None:
        """Let go of the files; reads under way finish first, each on the file it began with."""
        self._files = None
