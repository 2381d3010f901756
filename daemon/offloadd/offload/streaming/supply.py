"""Where the bytes of one component come from, and how they come to the device.

Promises: derived weights, where there are any, take the place of the source's own; memory that was
page-locked here is let go by `close`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.host_memory import bytes_of, view_of
from offloadd.offload.streaming.staging import StagedLoader, Staging
from offloadd.offload.streaming.transfers import DmaLoader, Loader, ReadLoader
from offloadd.store.derived_source import DerivedSource
from offloadd.store.source import PageLocking, WeightSource


class Supply:
    """`loader` brings ranges of the extent; None: the module computes on the host's own bytes."""

    def __init__(self, source: WeightSource, accelerator: Accelerator, staging: Staging) -> None:
        self.source = source
        self.derived: DerivedSource | None = None
        self.loader: Loader | None = None
        self._accelerator = accelerator
        self._extent: torch.Tensor | None = None
        self._unpin: Callable[[], None] | None = None
        view = source.host_view()
        if view is None and accelerator.has_dma:
            self.loader = StagedLoader(accelerator, source, staging)
        elif view is None:
            self.loader = ReadLoader(source)
        elif accelerator.has_dma:
            borders: tuple[int, ...] = ()
            if isinstance(source, PageLocking):
                borders = source.pin_borders
            else:
                self._unpin = accelerator.pin(view)
            self.loader = DmaLoader(accelerator, bytes_of(view), borders)
        else:
            self._extent = bytes_of(view)

    def loader_of(self, start_bytes: int, stop_bytes: int) -> tuple[Loader, int, int]:
        """What brings a range, and the range that it is to be asked for."""
        assert self.loader is not None  # nothing is brought where everything stays in place
        view = self.derived.derived(start_bytes, stop_bytes) if self.derived else None
        if view is None or self.derived is None:
            return self.loader, start_bytes, stop_bytes
        if self._accelerator.has_dma:
            derived = DmaLoader(self._accelerator, bytes_of(view))
            return derived, 0, stop_bytes - start_bytes
        return ReadLoader(self.derived), start_bytes, stop_bytes

    def in_memory(self, start_bytes: int, stop_bytes: int) -> torch.Tensor | None:
        """A range of the extent, derived or not, where the host has it."""
        view = self.derived.derived(start_bytes, stop_bytes) if self.derived else None
        if view is not None:
            return bytes_of(view)
        return None if self._extent is None else self._extent[start_bytes:stop_bytes]

    def stored(self, start_bytes: int, stop_bytes: int) -> torch.Tensor:
        """A range of the extent in host memory, read if need be; raises StorageFailed."""
        stored = self.in_memory(start_bytes, stop_bytes)
        if stored is None:
            stored = torch.empty(stop_bytes - start_bytes, dtype=torch.uint8)
            self.source.read(start_bytes, stop_bytes, view_of(stored)).result()
        return stored

    @property
    def extent(self) -> torch.Tensor:
        """All bytes where the host has them; only for a component that computes in place."""
        assert self._extent is not None
        return self._extent

    def close(self) -> None:
        """Let the source's memory go."""
        self._extent = None
        if self._unpin is not None:
            self._unpin()
        self.source.release_view()
