"""What an encoder's answer looks like, and whether it is of a kind that can be given twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.utils import ModelOutput


class NotKept(Exception):
    """An answer is of a kind that cannot be given twice."""


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer looks like: its class, and for each field what is there.

    That is None, the number of a tensor, a tuple of numbers (and None), or `OTHER`.
    """

    kind: type[ModelOutput]
    fields: Mapping[str, Any]


OTHER = "other"
"""Something that is no tensor, such as a cache: whoever reads it needs the encoder."""


def form_of(output: Any, inputs: Iterable[torch.Tensor]) -> Form:
    """The form of an answer to calls with these inputs.

    Raises `NotKept` for another class than those of transformers, and where tensors share memory
    with inputs or, without being one, with each other: what is written into one would show in the
    other, but not in copies.
    """
    if not isinstance(output, ModelOutput):
        raise NotKept(type(output).__name__)
    numbers = _Numbers(inputs)
    found = {one.name: numbers.field(getattr(output, one.name)) for one in fields(output)}
    return Form(type(output), found)


class _Numbers:
    """Numbers tensors in the order in which they are met; the same view has one number."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        self._views: dict[Any, int] = {}
        self._storages: dict[Any, int] = {
            one.untyped_storage().data_ptr(): -1 for one in inputs if one.numel()
        }

    def field(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return self._number(value)
        if type(value) is tuple and all(
            one is None or isinstance(one, torch.Tensor) for one in value
        ):
            return tuple(None if one is None else self._number(one) for one in value)
        return OTHER

    def _number(self, tensor: torch.Tensor) -> int:
        is_plain = (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and not (tensor.requires_grad or tensor.is_inference() or tensor.is_quantized)
            and not (tensor.is_conj() or tensor.is_neg())
        )
        if not is_plain:
            raise NotKept("a tensor that is not plain")
        at: Any = tensor.untyped_storage().data_ptr() if tensor.numel() else object()
        view = (at, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        number = self._views.setdefault(view, len(self._views))
        if self._storages.setdefault(at, number) != number:
            raise NotKept("tensors that share memory")
        return number
