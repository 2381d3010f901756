"""A component's weights in the host arena, as the offload engine sees them."""

from __future__ import annotations

from concurrent.futures import Future

from offloadd.store.host_source import HostSource
from offloadd.store.layout import Layout


class ArenaSource:
    """A `WeightSource`; made by `ArenaClient.open`."""

    def __init__(self, held: HostSource) -> None:
        self._held = held

    @property
    def layout(self) -> Layout:
        return self._held.layout

    def host_view(self) -> memoryview | None:
        return self._held.host_view()

    def release_view(self) -> None:
        self._held.release_view()

    def read(self, start_bytes: int, stop_bytes: int, into: memoryview) -> Future[int]:
        return self._held.read(start_bytes, stop_bytes, into)

    def close(self) -> None:
        """Let go of the weights; their memory is returned with the last view of them."""
        self._held.close()
