"""A group as the executor drives it: where its bytes are from, and whether it is on the device."""

from __future__ import annotations

from dataclasses import dataclass

from offloadd.offload.binding import Binding
from offloadd.offload.trace import StepTrace
from offloadd.offload.transfers import Load, Loader


@dataclass(slots=True, eq=False)
class Streamed:
    """One group; `keep` says that it stays once it has come, `users` who computes with it now."""

    component: str
    index: int
    name: str
    start_bytes: int
    stop_bytes: int
    binding: Binding
    loader: Loader
    keep: bool = False
    load: Load | None = None
    bound: bool = False
    users: int = 0

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def stays(self) -> bool:
        """Whether it is on the device in memory of its own that it is to keep."""
        return self.keep and self.load is not None and self.load.region.place is None


@dataclass(slots=True)
class StreamedComponent:
    """The groups of one component, the ring that they need, and who measures them now."""

    groups: tuple[Streamed, ...]
    ring_bytes: int = 0
    trace: StepTrace | None = None
