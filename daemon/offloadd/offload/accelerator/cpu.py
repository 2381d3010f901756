"""The CPU as a device: its memory tier is a budget of RAM, filled from disk by reader threads.

There is no second queue: compute is done when the call returns, so every event is over as soon as
it is recorded, and what has to be waited for are the readers, on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import psutil
import torch

from offload_protocol.errors import OutOfMemory
from offloadd.offload.accelerator.interface import DeviceMemory, Event, Queue
from offloadd.offload.host_memory import anonymous_bytes

PAGE_BYTES = 4096
"""What O_DIRECT reads want of the memory they write to."""


class _DoneEvent:
    """An event of a queue on which nothing is ever pending."""

    def __init__(self) -> None:
        self._recorded_s = 0.0

    def record(self, queue: Queue) -> None:
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_s(self, later: Event) -> float:
        return cast(_DoneEvent, later)._recorded_s - self._recorded_s


class _EagerQueue:
    """The calling thread itself."""

    def wait(self, event: Event) -> None:
        return


class CpuAccelerator:
    """Computes on the host; `allocate` gives anonymous memory that goes back when it is dropped."""

    device = torch.device("cpu")
    has_dma = False
    alignment_bytes = PAGE_BYTES

    def __init__(self) -> None:
        self.transfer_queue: Queue = _EagerQueue()

    def compute_queue(self) -> Queue:
        return self.transfer_queue

    def event(self, *, timed: bool = False) -> Event:
        return _DoneEvent()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        try:
            return anonymous_bytes(size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfMemory(
                f"the host has no {size_bytes} bytes of memory for weights",
                hint="give the model a smaller budget",
                details={"needed_bytes": size_bytes, "free_bytes": self.memory().free_bytes},
            ) from error

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def retire(self, region: torch.Tensor) -> None:
        return

    def memory(self) -> DeviceMemory:
        memory = psutil.virtual_memory()
        return DeviceMemory(free_bytes=memory.available, total_bytes=memory.total)

    def peak_bytes(self) -> int:
        return 0

    def restart_peak(self) -> None:
        return

    def pin(self, view: memoryview) -> Callable[[], None] | None:
        return None
