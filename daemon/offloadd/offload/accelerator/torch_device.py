"""Devices that torch drives with streams and events (CUDA, ROCm, XPU), through its generic API.

Copies are DMA transfers on a stream of their own; host memory is page-locked in place, at exactly
its size, because torch's own pinned allocator rounds every block up to a power of two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch

from offload_protocol.errors import ModelLoadFailed, OutOfMemory
from offloadd.offload.accelerator.interface import DeviceMemory, Event, Queue
from offloadd.offload.host_memory import bytes_of
from offloadd.store.layout import ALIGNMENT_BYTES

_log = logging.getLogger(__name__)


class _TorchEvent:
    def __init__(self, device: torch.device, timed: bool) -> None:
        self._event = torch.Event(device, enable_timing=timed)

    def record(self, queue: Queue) -> None:
        self._event.record(cast(_TorchQueue, queue).stream)

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_s(self, later: Event) -> float:
        return self._event.elapsed_time(cast(_TorchEvent, later)._event) / 1000


class _TorchQueue:
    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def wait(self, event: Event) -> None:
        self.stream.wait_event(cast(_TorchEvent, event)._event)


class TorchAccelerator:
    """One device with a transfer stream; the compute queue is whatever stream is current."""

    has_dma = True
    alignment_bytes = ALIGNMENT_BYTES

    def __init__(self, device: torch.device) -> None:
        if device.type in ("cpu", "meta") or not torch.accelerator.is_available():
            raise ModelLoadFailed(
                f"torch has no accelerator {str(device)!r} on this machine",
                hint="choose device 'cpu', or install a torch build that knows the device",
            )
        index = (
            device.index if device.index is not None else torch.accelerator.current_device_index()
        )
        self.device = torch.device(device.type, index)
        self._stream = torch.Stream(self.device)
        self.transfer_queue: Queue = _TorchQueue(self._stream)
        self._compute: _TorchQueue | None = None

    def compute_queue(self) -> Queue:
        stream = torch.accelerator.current_stream(self.device)
        if self._compute is None or self._compute.stream != stream:
            self._compute = _TorchQueue(stream)
        return self._compute

    def event(self, *, timed: bool = False) -> Event:
        return _TorchEvent(self.device, timed)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the device {self.device} has no {size_bytes} bytes left for weights",
                hint="give the model a smaller budget, or stop other programs on the device",
                details={"needed_bytes": size_bytes, "free_bytes": self.memory().free_bytes},
            ) from error

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self._stream:
            destination.copy_(source, non_blocking=True)

    def retire(self, region: torch.Tensor) -> None:
        return

    def memory(self) -> DeviceMemory:
        free_bytes, total_bytes = torch.get_device_module(self.device).mem_get_info(self.device)
        return DeviceMemory(free_bytes, total_bytes)

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.device))

    def restart_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def pin(self, view: memoryview) -> Callable[[], None] | None:
        if self.device.type != "cuda" or not view.nbytes:
            return None
        address = bytes_of(view).data_ptr()
        error = int(_cuda_runtime().cudaHostRegister(address, view.nbytes, 0))
        if error:
            _log.warning(
                "the driver did not page-lock %d bytes (error %d); copies from there are slower",
                view.nbytes,
                error,
            )
            self._drain_error()
            return None
        return lambda: self._unpin(address)

    def _unpin(self, address: int) -> None:
        error = int(_cuda_runtime().cudaHostUnregister(address))
        if error:
            _log.warning("the driver did not release page-locked memory (error %d)", error)
            self._drain_error()

    def _drain_error(self) -> None:
        # A refused registration stays behind as the runtime's last error, and the next kernel
        # launch that asks for it would be blamed. One small launch takes it out of the way.
        try:
            torch.zeros(1, device=self.device).add_(1)
            torch.accelerator.synchronize(self.device)
        except RuntimeError as error:
            _log.debug("drained the error that page-locking left behind: %s", error)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
