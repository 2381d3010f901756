"""A model's weights in host memory: kept warm by use, given up for others, brought back for a job.

What the store had no room for is read from disk on its way to the device; as soon as all of a
component is in memory, it is used from there again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from offloadd.hosting.loading.parts import Source
from offloadd.store.arena.source import ArenaSource


class HostRoom:
    """The sources of one model that are in the store's memory, all or in part."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._held = {
            name: source for name, source in sources.items() if isinstance(source, ArenaSource)
        }

    def whole(self) -> frozenset[str]:
        """The components that are in memory to the last byte."""
        return frozenset(name for name, source in self._held.items() if source.is_whole)

    @property
    def is_short(self) -> bool:
        """Whether a component that belongs into memory is not there, or not all of it."""
        return len(self.whole()) < len(self._held)

    def touch(self) -> None:
        """The model is in use: others give way before it."""
        for source in self._held.values():
            source.touch()

    def gather(self, watch: Callable[[], None]) -> None:
        """Bring back what there is room for; what is colder gives way, but nothing of this model.

        Raises `StorageFailed` where its files cannot be read, and what `watch` raises.
        """
        for source in self._held.values():
            if not source.is_whole:
                source.gather(lambda done, total: watch())
