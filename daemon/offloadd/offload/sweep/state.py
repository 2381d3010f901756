"""What the members of a sweep share by being in one process, kept apart for each of them.

Promises: the global random generators of torch go on for each member as if nobody else drew from
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class GlobalRandomness:
    """The `Switch` of torch's global generators, of the CPU and of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._on_cpu = torch.get_rng_state()
        self._on_device: torch.Tensor | None = None
        self.suspend()

    def suspend(self) -> None:
        self._on_cpu = torch.get_rng_state()
        if self._device is not None:
            self._on_device = torch.cuda.get_rng_state(self._device)

    def resume(self) -> None:
        torch.set_rng_state(self._on_cpu)
        if self._device is not None and self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)


def thread_state(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Gives contexts in which another thread draws on the device as this one does now.

    Torch keeps the current device and its queue for each thread, and whether to track gradients,
    which no member wants.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def state() -> Iterator[None]:
        with torch.no_grad(), torch.cuda.stream(stream):
            yield

    return state
