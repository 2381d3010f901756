"""Where a worker gets a component's weights in host memory: `ArenaClient.open`.

For now each source is loaded into memory of its own by the process that opens it; nothing is
shared, evicted or kept when the process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from offloadd.store.arena.source import ArenaSource
from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.host_source import HostSource
from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import Layout
from offloadd.store.reader import DiskReader

OnBytes = Callable[[int, int], None]
"""Told how many bytes of an extent are there, and of how many; may raise to stop."""


class ArenaClient:
    """One for each process; every method may be called from any thread."""

    def __init__(self, reader: DiskReader) -> None:
        self._reader = reader

    def open(
        self,
        index: CheckpointIndex,
        layout: Layout,
        *,
        owner: str = "",
        names: Mapping[str, str] | None = None,
        on_bytes: OnBytes = lambda done, total: None,
    ) -> ArenaSource:
        """The weights of one component, in memory when it returns; close it when done.

        `layout` says what the bytes are to be, dtypes included; they must be those of the files.
        `owner` is `MODEL/COMPONENT`, for the accounts; `names` gives the checkpoint's name of a
        tensor where it differs from the layout's. Raises `ModelLoadFailed` where the files do not
        fit the layout, `StorageFailed`, `OutOfMemory`, and whatever `on_bytes` raises.
        """
        on_bytes(0, layout.size_bytes)
        files = CheckpointSource(index, layout, self._reader, names=names)
        try:
            held = HostSource.load(files)
        finally:
            files.close()
        on_bytes(layout.size_bytes, layout.size_bytes)
        return ArenaSource(held)
