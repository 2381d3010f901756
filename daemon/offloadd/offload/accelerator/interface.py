"""What the executor asks of a device: memory, two queues, events between them, and one copy.

The device runs what is put on a queue in order, later, while the host goes on. Nothing orders two
queues but events, with the meaning that CUDA gives them: `Queue.wait` waits for what the event's
last `record` before that call covered, and an event that was never recorded holds nobody up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the device says about its memory now; other programs' use is inside the difference."""

    free_bytes: int
    total_bytes: int


class Event(Protocol):
    """A point in a queue that other queues and the host can wait for."""

    def record(self, queue: Queue) -> None:
        """Cover everything that has been put on the queue so far; replaces an earlier record."""
        ...

    def query(self) -> bool:
        """Whether all that the last record covered is done; True before the first record."""
        ...

    def synchronize(self) -> None:
        """Hold the calling thread until `query()` is true."""
        ...

    def elapsed_s(self, later: Event) -> float:
        """Device time between two timed events that are both done."""
        ...


class Queue(Protocol):
    """An order in which the device works."""

    def wait(self, event: Event) -> None:
        """Let what is put on this queue from now on start only after the event."""
        ...


class Accelerator(Protocol):
    """A device that computes.

    `has_dma` says how weights come to it. True: `copy` moves them from host memory on the transfer
    queue. False: the device's memory is ordinary memory, which a source's reader threads fill
    directly, and in which weights that already lie in host memory are used where they are.
    """

    @property
    def device(self) -> torch.device:
        """Where tensors live while a module computes."""
        ...

    @property
    def has_dma(self) -> bool: ...

    @property
    def alignment_bytes(self) -> int:
        """Where places in the ring may start."""
        ...

    @property
    def transfer_queue(self) -> Queue: ...

    def compute_queue(self) -> Queue:
        """The queue that modules called by this thread compute on now."""
        ...

    def event(self, *, timed: bool = False) -> Event:
        """A new event, not yet recorded."""
        ...

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """A one-dimensional uint8 tensor of that size, starting on `alignment_bytes`.

        Its memory may have been in use on the compute queue until this moment, and is again from
        the moment the last reference to it goes. Raises `OutOfMemory`.
        """
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy of bytes from host memory (page-locked, unchanging) on the transfer queue."""
        ...

    def retire(self, region: torch.Tensor) -> None:
        """Say that the bytes of this region will be written before they are read again."""
        ...

    def memory(self) -> DeviceMemory: ...

    def peak_bytes(self) -> int:
        """The most bytes that this program's tensors took at once; 0 where nobody counts."""
        ...

    def restart_peak(self) -> None:
        """Count `peak_bytes` from now on."""
        ...

    def pin(self, view: memoryview) -> Callable[[], None] | None:
        """Page-lock host memory in place; gives the call that undoes it.

        None where the device has no use for it or the system refuses: copies from that memory are
        right all the same, only slower.
        """
        ...
