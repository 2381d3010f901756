"""Weights that libraries put together from several plain tensors, as quantised ones are.

Such a weight (integers and their scales, as one tensor of a subclass) is stored as one run of
bytes, each inner tensor aligned in it, and moves like any other weight; what a module computes with
is the library's own tensor over those bytes, so that nothing is copied, let alone dequantised.

A subclass says what it is made of by `__tensor_flatten__`, as torch asks of those that compile; for
one that does not, `take_apart_by` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offloadd.offload.weights.forms import DTYPE_NAMES, DTYPES, Form, form_of
from offloadd.store.layout import TensorSpec, align

Parts = Mapping[str, torch.Tensor]
Join = Callable[[Parts], torch.Tensor]
"""Puts a weight together from its parts."""

TakeApart = Callable[[Any], tuple[Parts, Join]]
"""The parts of a weight, and what puts others of the same shapes together."""

_known: dict[type[torch.Tensor], TakeApart] = {}


def take_apart_by(kind: type[torch.Tensor], take_apart: TakeApart) -> None:
    """Say how weights of a subclass are taken apart that does not say so itself."""
    _known[kind] = take_apart


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How a weight is put together from the bytes that are stored.

    `parts` are the inner tensors' forms and where each starts, `dtype`, `shape` and `stride` what
    the weight answers when it is asked.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parts: tuple[tuple[str, Form, int], ...]
    join: Join = field(compare=False)

    @property
    def size_bytes(self) -> int:
        """Bytes from the first part's first to the last part's last."""
        return max((start + form.size_bytes for _, form, start in self.parts), default=0)

    def spec(self, name: str) -> TensorSpec:
        """What is stored: bytes, whatever they mean."""
        return TensorSpec(name, "U8", (self.size_bytes,))

    def is_stored_as(self, spec: TensorSpec) -> bool:
        """Always: what is put together has no other form."""
        return True

    def blank(self) -> torch.Tensor:
        """The weight without values, all parts on meta."""
        return self.join({name: form.blank() for name, form, _ in self.parts})

    def face(self) -> torch.Tensor:
        """A plain meta tensor that looks like the weight from outside."""
        return torch.empty_strided(self.shape, self.stride, dtype=DTYPES[self.dtype], device="meta")

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """The weight whose parts' bytes `memory` (uint8) holds."""
        return self.join(
            {name: form.over(memory[at : at + form.size_bytes]) for name, form, at in self.parts}
        )

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """The bytes (uint8, on the CPU) of a weight of this form."""
        memory = torch.zeros(self.size_bytes, dtype=torch.uint8)
        found, _ = _taken_apart(weight)
        for name, form, start in self.parts:
            form.over(memory[start : start + form.size_bytes]).copy_(found[name])
        return memory


def packed_form(tensor: torch.Tensor) -> PackedForm | None:
    """How to store a weight that is made of others; None for one that is plain or of unknown kind.

    Also None where a part is of a dtype that no layout holds, or is itself no plain tensor.
    """
    if not _can_be_taken_apart(tensor):
        return None
    found, join = _taken_apart(tensor)
    dtype = DTYPE_NAMES.get(tensor.dtype)
    parts: list[tuple[str, Form, int]] = []
    cursor = 0
    for name, part in found.items():
        form = form_of(part) if type(part) in (torch.Tensor, torch.nn.Parameter) else None
        if form is None or dtype is None:
            return None
        parts.append((name, form, cursor))
        cursor = align(cursor + form.size_bytes)
    if dtype is None:
        return None
    return PackedForm(dtype, tuple(tensor.shape), tuple(tensor.stride()), tuple(parts), join)


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's values: itself, or its parts."""
    return list(_taken_apart(tensor)[0].values()) if _can_be_taken_apart(tensor) else [tensor]


def _can_be_taken_apart(tensor: torch.Tensor) -> bool:
    return type(tensor) in _known or is_traceable_wrapper_subclass(tensor)


def _taken_apart(tensor: Any) -> tuple[Parts, Join]:
    known = _known.get(type(tensor))
    if known is not None:
        return known(tensor)
    names, context = tensor.__tensor_flatten__()
    kind, shape, stride = type(tensor), tensor.shape, tensor.stride()

    def join(parts: Parts) -> torch.Tensor:
        joined: torch.Tensor = kind.__tensor_unflatten__(dict(parts), context, shape, stride)
        return joined

    return {name: getattr(tensor, name) for name in names}, join
