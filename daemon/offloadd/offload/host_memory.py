"""Host memory seen by torch: byte tensors over views, and writable views over byte tensors."""

from __future__ import annotations

import ctypes
import mmap
from typing import cast

import numpy as np
import torch
from typing_extensions import Buffer


def anonymous_bytes(size_bytes: int) -> torch.Tensor:
    """Fresh zeroed memory, starting on a page, that goes back to the system when dropped.

    A mapping of its own, because what is left over of an arena would not go back. Raises OSError,
    ValueError or OverflowError where there is no such memory.
    """
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]


def bytes_of(view: memoryview) -> torch.Tensor:
    """A one-dimensional uint8 tensor over the view's own memory, which it keeps alive.

    Weights are read-only views and torch has no read-only tensors: who writes to the tensor writes
    to memory that may be protected, or shared with other models.
    """
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    array = np.frombuffer(view, dtype=np.uint8)
    span = (ctypes.c_char * view.nbytes).from_address(array.ctypes.data)
    # The span knows an address only; the tensor's storage keeps the span, and it keeps the view.
    span.__dict__["view"] = view
    return torch.frombuffer(span, dtype=torch.uint8)


def view_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous uint8 tensor in host memory."""
    return memoryview(cast(Buffer, tensor.numpy()))
