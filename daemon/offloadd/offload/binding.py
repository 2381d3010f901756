"""Puts a group's weights into its modules and takes them out again.

Promises: an absent weight is a meta parameter in every place that holds it (`absent`), so that
nothing can read memory that is reused; a present weight is a view of the region that the executor
names, made without allocating or copying. Modules are referred to weakly: a binding never keeps a
model alive.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offloadd.offload.absent import WeightReader, absent_weight
from offloadd.offload.groups import Group, TensorRef
from offloadd.offload.ties import DTYPE_NAMES
from offloadd.store.layout import Layout

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""The torch dtype of each safetensors name that a layout may hold."""

_REMEMBERED_REGIONS = 8
"""For how many places in the ring a group keeps its parameters; uniform groups use few."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One dictionary entry of one module; says whether the module is still there."""

    module: weakref.ref[nn.Module]
    attribute: str
    is_parameter: bool

    def put(self, tensor: torch.Tensor) -> None:
        module = self.module()
        if module is None:
            return
        # The dictionaries themselves: __setattr__ would check and register for nothing.
        if self.is_parameter:
            module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        else:
            module._buffers[self.attribute] = tensor


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor of the group: where it lies in the group's region, and what stands for it."""

    places: tuple[_Place, ...]
    start_bytes: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    absent: nn.Parameter

    def blank(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def seen_in(self, region: torch.Tensor) -> nn.Parameter:
        """The weight as a view of the region."""
        stop_bytes = self.start_bytes + self.size_bytes
        view = region[self.start_bytes : stop_bytes].view(self.dtype).view(self.shape)
        return nn.Parameter(view, requires_grad=False)


class Binding:
    """The weights that one region holds; `regions` are uint8 tensors of the group's size."""

    def __init__(self, weights: Sequence[_Weight]) -> None:
        self._weights = tuple(weights)
        self._seen: OrderedDict[int, tuple[nn.Parameter, ...]] = OrderedDict()

    def present(self, region: torch.Tensor) -> None:
        """Make every weight a view of the region."""
        address = region.data_ptr()
        parameters = self._seen.get(address)
        if parameters is None:
            with torch.inference_mode(False), torch.no_grad():
                parameters = tuple(weight.seen_in(region) for weight in self._weights)
            self._seen[address] = parameters
            if len(self._seen) > _REMEMBERED_REGIONS:
                self._seen.popitem(last=False)
        for weight, parameter in zip(self._weights, parameters, strict=True):
            for place in weight.places:
                place.put(parameter)

    def absent(self) -> None:
        """Leave in every place what stands for the weight and can fetch it."""
        for weight in self._weights:
            for place in weight.places:
                place.put(weight.absent)

    def unbind(self) -> None:
        """Leave plain meta parameters: nothing brings these weights any more."""
        for weight in self._weights:
            blank = nn.Parameter(weight.blank(), requires_grad=False)
            for place in weight.places:
                place.put(blank)
        self.forget()

    def forget(self) -> None:
        """Drop what keeps regions alive; call when weights are absent and a region goes."""
        self._seen.clear()


def bind_group(module: nn.Module, layout: Layout, group: Group, reader: WeightReader) -> Binding:
    """The binding of a group of the module that the grouping was made of; binds nothing yet."""
    return _bind(module, layout, group.tensors, group.start_bytes, reader)


def bind_tensor(
    module: nn.Module, layout: Layout, tensor: TensorRef, reader: WeightReader
) -> Binding:
    """The binding of one leftover parameter that the layout holds."""
    return _bind(module, layout, (tensor,), layout.slots()[tensor.spec.name].offset_bytes, reader)


def _bind(
    module: nn.Module,
    layout: Layout,
    tensors: Sequence[TensorRef],
    start_bytes: int,
    reader: WeightReader,
) -> Binding:
    slots = layout.slots()
    modules = dict(module.named_modules(remove_duplicate=False))
    weights = []
    for tensor in tensors:
        dtype = DTYPES[tensor.spec.dtype]
        blank = torch.empty(tensor.spec.shape, dtype=dtype, device="meta")
        weights.append(
            _Weight(
                places=tuple(
                    _Place(weakref.ref(modules[path]), attribute, tensor.kind == "parameter")
                    for path, attribute in tensor.places
                ),
                start_bytes=slots[tensor.spec.name].offset_bytes - start_bytes,
                size_bytes=tensor.size_bytes,
                dtype=dtype,
                shape=tensor.spec.shape,
                absent=absent_weight(blank, tensor.places[0], reader),
            )
        )
    return Binding(weights)
