"""Where each tensor of a component lies inside its extent, whatever groups are made of it later.

A layout is made once per checkpoint and dtype: units (the tensors of one lowest layer) follow each
other in module order, and each tensor starts on a 256-byte boundary, which satisfies every device
kernel known to read weights through wide loads. Gaps are never read. All arithmetic is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 256

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits per element of the safetensors dtype names that a layout may hold."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as a checkpoint describes it: full dotted name, safetensors dtype name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        elements = 1
        for length in self.shape:
            elements *= length
        return elements * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor's place: `offset_bytes` from the start of the extent, a multiple of 256."""

    spec: TensorSpec
    offset_bytes: int

    @property
    def stop_bytes(self) -> int:
        return self.offset_bytes + self.spec.size_bytes


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The tensors of one lowest layer; `name` is the layer's dotted path (empty for the root)."""

    name: str
    tensors: tuple[TensorSlot, ...]
    start_bytes: int
    stop_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All units of a component; `size_bytes` is the extent's size, a multiple of 256."""

    units: tuple[UnitLayout, ...]
    size_bytes: int

    def slots(self) -> dict[str, TensorSlot]:
        """Every tensor's slot by its full name."""
        return {slot.spec.name: slot for unit in self.units for slot in unit.tensors}


def align(offset_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """The first multiple of the alignment at or after the offset."""
    return -(-offset_bytes // alignment_bytes) * alignment_bytes


def lay_out(units: Iterable[tuple[str, Sequence[TensorSpec]]]) -> Layout:
    """Place units one after the other in the order given; empty units take no room."""
    placed: list[UnitLayout] = []
    cursor = 0
    for name, specs in units:
        start = cursor
        slots: list[TensorSlot] = []
        for spec in specs:
            slots.append(TensorSlot(spec, cursor))
            cursor = align(cursor + spec.size_bytes)
        placed.append(UnitLayout(name, tuple(slots), start, cursor))
    return Layout(tuple(placed), cursor)
