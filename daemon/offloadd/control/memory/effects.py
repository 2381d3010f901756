"""What the catalogue of host memory wants done; `HostMemory` does it, in this order."""

from __future__ import annotations

from dataclasses import dataclass

from offloadd.channel.base import ToWorker
from offloadd.control.memory.extents import WorkerId


@dataclass(frozen=True, slots=True)
class Create:
    """Make the memory of a new segment."""

    number: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Free:
    """Give a segment's memory back, then say `freed`."""

    number: int


@dataclass(frozen=True, slots=True)
class Keep:
    """A segment's bytes are final: it may outlive the daemon."""

    number: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a worker, with the descriptors of these segments."""

    worker: WorkerId
    message: ToWorker
    numbers: tuple[int, ...] = ()


Effect = Create | Free | Keep | Tell
