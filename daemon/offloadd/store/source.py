"""The seam between the store and the offload engine: where an extent's bytes can be had from."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from offloadd.store.layout import Layout


@runtime_checkable
class PageLocking(Protocol):
    """A source that page-locks its memory itself, in the background and in pieces."""

    @property
    def pin_borders(self) -> tuple[int, ...]:
        """Offsets in the extent, in order, at which one piece ends and the next begins.

        A copy to a device is made of parts that do not cross one: that a driver takes a copy across
        two registrations is promised nowhere.
        """
        ...


class WeightSource(Protocol):
    """One component's weights, addressed by byte ranges of its layout.

    Weights are immutable while a source is open. Every method may be called from any thread.
    """

    @property
    def layout(self) -> Layout:
        """Where each tensor lies in the extent."""
        ...

    def host_view(self) -> memoryview | None:
        """The whole extent in host memory (read-only, page-locked where the device has DMA).

        None while the extent rests on disk. The view stays valid until `release_view`.
        """
        ...

    def release_view(self) -> None:
        """Say that the last view handed out is no longer used, so that the store may evict it."""
        ...

    def read(self, start_bytes: int, stop_bytes: int, into: memoryview) -> Future[int]:
        """Fill `into` (writable, `stop - start` bytes) with that range, in the background.

        Bytes of alignment gaps are left as they are. The future gives the bytes read from disk (0
        where host memory served); it fails with `StorageFailed` when the file is gone, short, or
        no longer the file that was indexed.
        """
        ...
