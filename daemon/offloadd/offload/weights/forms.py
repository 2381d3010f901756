"""How a module wants a weight, where that differs from how its bytes are stored.

A layout stores each tensor row by row, in the dtype that it is transferred in. A module may compute
in another dtype (layerwise casting) or with other strides (`channels_last`), and its numbers depend
on both. Where only the strides differ in name (lengths of 1), the stored bytes serve as they are;
otherwise the weight is converted on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offloadd.store.layout import DTYPE_BITS, TensorSpec

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""The safetensors names of the dtypes that a layout may hold."""

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""The torch dtype of each safetensors name that a layout may hold."""


@dataclass(frozen=True, slots=True)
class Form:
    """Dtype (safetensors name), shape and strides (in elements) that a module computes with."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        elements = 1
        for length in self.shape:
            elements *= length
        return elements * DTYPE_BITS[self.dtype] // 8

    def blank(self) -> torch.Tensor:
        """A meta tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=DTYPES[self.dtype], device="meta")

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor whose bytes `memory` (uint8, of exactly that size) holds in this form."""
        return memory.view(DTYPES[self.dtype]).as_strided(self.shape, self.stride)

    def is_stored_as(self, spec: TensorSpec) -> bool:
        """Whether the stored bytes can be computed with as they are."""
        return self.dtype == spec.dtype and _is_row_by_row(self.shape, self.stride)


def form_of(tensor: torch.Tensor) -> Form | None:
    """How a module holds a tensor now; None for a dtype that no layout holds.

    Strides that leave holes, or let elements share memory, cannot be kept; row by row then.
    """
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        return None
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return Form(name, shape, stride if _is_dense(shape, stride) else _row_by_row(shape))


def stored_form(spec: TensorSpec) -> Form:
    """The form of the stored bytes."""
    return Form(spec.dtype, spec.shape, _row_by_row(spec.shape))


def _is_row_by_row(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements lie in memory in the order of their indices."""
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length > 1 and step != expected:
            return False
        expected *= length
    return True


def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory exactly once, in whatever order."""
    expected = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1:
            if step != expected:
                return False
            expected *= length
    return True
