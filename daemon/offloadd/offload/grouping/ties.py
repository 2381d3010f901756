"""Every tensor of a module once: who owns it, which other places hold it too, whether it can move.

Promises: the owner is the first place in module order; tensors of the same bytes (the same object,
or equal views of one storage) have one owner; tensors whose bytes overlap in part, and tensors that
the engine cannot move byte by byte, are refused by name. Data is never read, so that weights may be
on meta.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.offload.weights.absent import AbsentWeight
from offloadd.offload.weights.forms import DTYPE_NAMES, Form, form_of
from offloadd.offload.weights.packed import PackedForm, packed_form
from offloadd.store.layout import TensorSpec

Kind = Literal["parameter", "buffer"]


@dataclass(slots=True)
class OwnedTensor:
    """A tensor with its owner's module path; `aliases` are the other places, in module order.

    `form` is how the module holds it, None for a buffer of a dtype that no layout holds.
    """

    owner: str
    attribute: str
    kind: Kind
    spec: TensorSpec
    size_bytes: int
    form: Form | PackedForm | None
    aliases: list[tuple[str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.spec.name


def dotted(path: str, name: str) -> str:
    """The path of `name` inside the module at `path`, which is empty for the root."""
    return f"{path}.{name}" if path else name


def is_within(path: str, ancestor: str) -> bool:
    """Whether the module at `path` is the one at `ancestor` or lies inside it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def owned_tensors(module: nn.Module) -> tuple[OwnedTensor, ...]:
    """All parameters and buffers in module order (a module's own before its children's).

    Raises ModelLoadFailed naming the tensor that is of an unknown subclass, not dense, of a dtype
    that no layout holds, or that shares part of its bytes with another.
    """
    owned: list[OwnedTensor] = []
    by_object: dict[int, OwnedTensor] = {}
    storages: dict[int, list[tuple[torch.Tensor, OwnedTensor]]] = {}
    for path, attribute, kind, placed in _places(module):
        tensor = _inspectable(placed)
        known = by_object.get(id(placed))
        if known is not None:
            known.aliases.append((path, attribute))
            continue
        name = dotted(path, attribute)
        packed = packed_form(tensor) if kind == "parameter" else None
        if packed is not None:
            spec = packed.spec(name)
            record = OwnedTensor(path, attribute, kind, spec, spec.size_bytes, packed)
            owned.append(record)
            by_object[id(placed)] = record
            continue
        _check_movable(name, kind, tensor)
        sharing = storages.setdefault(tensor.untyped_storage()._cdata, [])
        twin = _twin(name, tensor, sharing)
        if twin is not None:
            twin.aliases.append((path, attribute))
            by_object[id(placed)] = twin
            continue
        size_bytes = tensor.numel() * tensor.element_size()
        spec = TensorSpec(name, _dtype_name(tensor.dtype), tuple(tensor.shape))
        record = OwnedTensor(path, attribute, kind, spec, size_bytes, form_of(tensor))
        owned.append(record)
        by_object[id(placed)] = record
        sharing.append((tensor, record))
    return tuple(owned)


def _places(module: nn.Module) -> Iterator[tuple[str, str, Kind, torch.Tensor]]:
    """Every place that holds a tensor; a module reached by two paths is walked twice."""
    for path, child in module.named_modules(remove_duplicate=False):
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
                yield path, attribute, "parameter", parameter
        for attribute, buffer in child._buffers.items():
            if buffer is not None:
                yield path, attribute, "buffer", buffer


def _inspectable(tensor: torch.Tensor) -> torch.Tensor:
    """An absent weight as the meta parameter that it is, so that looking at it fetches nothing."""
    if not isinstance(tensor, AbsentWeight):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return nn.Parameter(tensor.as_subclass(torch.Tensor), requires_grad=False)


def _dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _check_movable(name: str, kind: Kind, tensor: torch.Tensor) -> None:
    plain = (nn.Parameter,) if kind == "parameter" else (torch.Tensor, nn.Parameter, nn.Buffer)
    if type(tensor) not in plain:
        raise _refusal(
            name, f"is a {type(tensor).__name__}, whose inner tensors cannot be streamed"
        )
    if tensor.layout is not torch.strided:
        raise _refusal(name, f"is stored as {str(tensor.layout).removeprefix('torch.')}, not dense")
    if kind == "parameter" and tensor.dtype not in DTYPE_NAMES:
        raise _refusal(name, f"has dtype {_dtype_name(tensor.dtype)}, which no layout holds")


def _twin(
    name: str, tensor: torch.Tensor, sharing: list[tuple[torch.Tensor, OwnedTensor]]
) -> OwnedTensor | None:
    """The owner of the same view of the same storage; refuses a view that overlaps in part."""
    start, stop = _reach(tensor)
    for other, record in sharing:
        if _view(tensor) == _view(other):
            return record
        other_start, other_stop = _reach(other)
        if max(start, other_start) < min(stop, other_stop):
            raise _refusal(name, f"shares part of its memory with `{record.name}`")
    return None


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of the storage that the view touches, and the one after the last."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((int(length) - 1) * int(step) for length, step in steps)
    return start, start + (last + 1) * tensor.element_size()


def _refusal(name: str, why: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"The tensor `{name}` {why}.",
        hint='Host this component with offload = "none", or load it without quantisation.',
        details={"tensor": name},
    )
