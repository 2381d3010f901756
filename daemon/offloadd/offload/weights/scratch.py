"""Device memory for weights that are converted while their group is used.

Promises: groups are used one after the other, so one piece serves them all, and nothing but the
compute queue ever touches it, so no event is needed; a group that is used inside another one (a
weight read past its own module) gets memory of its own.
"""

from __future__ import annotations

import torch

from offloadd.offload.streaming.tier import DeviceTier, Region


class Scratch:
    """The scratch memory of one component; counts against the tier's limit."""

    def __init__(self, tier: DeviceTier) -> None:
        self._tier = tier
        self._region: Region | None = None
        self._is_lent = False
        self._extra: dict[int, Region] = {}

    @property
    def size_bytes(self) -> int:
        return self._region.size_bytes if self._region is not None else 0

    def reserve(self, size_bytes: int) -> None:
        """Have so much at hand from now on; nothing of it may be lent.

        Raises OutOfMemory; then each use asks for memory of its own.
        """
        if size_bytes <= self.size_bytes:
            return
        self.close()
        self._region = self._tier.allocate(size_bytes)

    def lend(self, size_bytes: int) -> torch.Tensor:
        """Memory (uint8) until `take_back`; raises OutOfMemory only where extra is needed."""
        if self._region is not None and not self._is_lent and size_bytes <= self.size_bytes:
            self._is_lent = True
            return self._region.tensor
        extra = self._tier.allocate(size_bytes)
        self._extra[extra.tensor.data_ptr()] = extra
        return extra.tensor

    def take_back(self, memory: torch.Tensor) -> bool:
        """The memory is no longer used; says whether the same memory will be lent again."""
        extra = self._extra.pop(memory.data_ptr(), None)
        if extra is None:
            self._is_lent = False
            return True
        self._tier.release(extra)
        return False

    def close(self) -> None:
        """Give everything back."""
        if self._region is not None:
            self._tier.release(self._region)
        self._region = None
