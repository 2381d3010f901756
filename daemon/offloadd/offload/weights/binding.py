"""Puts a group's weights into its modules and takes them out again.

Promises: an absent weight is a meta parameter in every place that holds it (`absent`), so that
nothing can read memory that is reused; a present weight is a view of the region that the executor
names, made without allocating or copying, or where its form is not the stored one, a view of
scratch memory that it was converted into on the compute queue. Modules are referred to weakly: a
binding never keeps a model alive.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offloadd.offload.grouping.grouping import Group, TensorRef
from offloadd.offload.weights.absent import WeightReader, absent_weight
from offloadd.offload.weights.forms import Form, stored_form
from offloadd.offload.weights.packed import PackedForm
from offloadd.offload.weights.scratch import Scratch
from offloadd.store.layout import Layout

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
    """A tensor of the group: where it lies in the group's region, and what stands for it.

    `converted_at` is where in the scratch memory its form goes; None if the region has the form.
    """

    places: tuple[_Place, ...]
    start_bytes: int
    stored: Form
    form: Form | PackedForm
    converted_at: int | None
    absent: nn.Parameter

    def parameter(self, tensor: torch.Tensor) -> nn.Parameter:
        """The parameter that a module sees; it requires gradients if the module's own did.

        Nothing computes gradients, but some functions of torch take another path by that flag, and
        with it give other numbers.
        """
        return nn.Parameter(tensor, requires_grad=self.absent.requires_grad)

    def in_region(self, region: torch.Tensor) -> torch.Tensor:
        return self.stored.over(_piece(region, self.start_bytes, self.stored))

    def seen(self, region: torch.Tensor, scratch: torch.Tensor | None) -> torch.Tensor:
        """The weight in its form."""
        if self.converted_at is None or scratch is None:
            return self.form.over(_piece(region, self.start_bytes, self.form))
        return self.form.over(_piece(scratch, self.converted_at, self.form))


@dataclass(frozen=True, slots=True)
class _Seen:
    """A group's parameters at one place, and what must be copied, from and to, to fill them."""

    parameters: tuple[nn.Parameter, ...]
    conversions: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class Binding:
    """The weights that one region holds; `regions` are uint8 tensors of the group's size.

    `held` is memory that holds the group for good, in place of any region.
    """

    def __init__(
        self,
        weights: Sequence[_Weight],
        scratch: Scratch | None = None,
        scratch_bytes: int = 0,
        held: torch.Tensor | None = None,
    ) -> None:
        self._weights = tuple(weights)
        self._scratch = scratch
        self._scratch_bytes = scratch_bytes
        self._held = held
        self._lent: torch.Tensor | None = None
        self._seen: OrderedDict[tuple[int, int], _Seen] = OrderedDict()

    @property
    def converts(self) -> bool:
        """Whether the weights are to be made absent after each use, wherever their bytes stay."""
        return self._scratch_bytes > 0

    def present(self, region: torch.Tensor) -> None:
        """Make every weight a view of the region, or of what it is converted into.

        Raises OutOfMemory when there is no memory to convert into; then all are still absent.
        """
        region = region if self._held is None else self._held
        if self._scratch is not None and self._scratch_bytes and self._lent is None:
            self._lent = self._scratch.lend(self._scratch_bytes)
        key = region.data_ptr(), 0 if self._lent is None else self._lent.data_ptr()
        seen = self._seen.get(key)
        if seen is None:
            seen = self._see(region, self._lent)
            self._seen[key] = seen
            if len(self._seen) > _REMEMBERED_REGIONS:
                self._seen.popitem(last=False)
        with torch.no_grad():
            for stored, converted in seen.conversions:
                converted.copy_(stored)
        for weight, parameter in zip(self._weights, seen.parameters, strict=True):
            for place in weight.places:
                place.put(parameter)

    def absent(self) -> None:
        """Leave in every place what stands for the weight and can fetch it."""
        for weight in self._weights:
            for place in weight.places:
                place.put(weight.absent)
        self._give_scratch_back()

    def unbind(self) -> None:
        """Leave plain meta parameters: nothing brings these weights any more."""
        for weight in self._weights:
            blank = weight.parameter(weight.form.blank())
            for place in weight.places:
                place.put(blank)
        self._give_scratch_back()
        self.forget()

    def forget(self) -> None:
        """Drop what keeps regions alive; call when weights are absent and a region goes."""
        self._seen.clear()

    def _see(self, region: torch.Tensor, scratch: torch.Tensor | None) -> _Seen:
        with torch.inference_mode(False), torch.no_grad():
            views = [weight.seen(region, scratch) for weight in self._weights]
            return _Seen(
                tuple(
                    weight.parameter(view)
                    for weight, view in zip(self._weights, views, strict=True)
                ),
                tuple(
                    (weight.in_region(region), view)
                    for weight, view in zip(self._weights, views, strict=True)
                    if weight.converted_at is not None
                ),
            )

    def _give_scratch_back(self) -> None:
        lent, self._lent = self._lent, None
        if lent is None or self._scratch is None:
            return
        if not self._scratch.take_back(lent):
            self._seen.clear()


def bind_group(
    modules: Mapping[str, nn.Module],
    layout: Layout,
    group: Group,
    reader: WeightReader,
    scratch: Scratch,
    held: torch.Tensor | None = None,
) -> Binding:
    """The binding of a group; `modules` are those that the grouping was made of, by path.

    Binds nothing yet.
    """
    slots = layout.slots()
    weights: list[_Weight] = []
    cursor = 0
    for tensor in group.tensors:
        start_bytes = slots[tensor.spec.name].offset_bytes - group.start_bytes
        converted_at = cursor if tensor.converted_bytes else None
        weights.append(_weight(modules, tensor, reader, start_bytes, converted_at))
        cursor += tensor.converted_bytes
    return Binding(weights, scratch, cursor, held)


def bind_tensor(
    modules: Mapping[str, nn.Module], tensor: TensorRef, reader: WeightReader
) -> Binding:
    """The binding of one leftover weight, whose regions hold it in its form."""
    return Binding([_weight(modules, tensor, reader, 0, None)])


def convert(tensor: TensorRef, stored: torch.Tensor, kept: torch.Tensor) -> None:
    """Fill `kept` (uint8) with the form of what `stored` (uint8) holds."""
    assert tensor.form is not None  # every weight has one
    with torch.no_grad():
        tensor.form.over(kept[: tensor.form.size_bytes]).copy_(
            stored_form(tensor.spec).over(stored[: tensor.size_bytes])
        )


def _weight(
    modules: Mapping[str, nn.Module],
    tensor: TensorRef,
    reader: WeightReader,
    start_bytes: int,
    converted_at: int | None,
) -> _Weight:
    form = tensor.form
    assert form is not None  # every weight has one
    path, attribute = tensor.places[0]
    held = modules[path]._parameters.get(attribute)
    return _Weight(
        places=tuple(
            _Place(weakref.ref(modules[path]), attribute, tensor.kind == "parameter")
            for path, attribute in tensor.places
        ),
        start_bytes=start_bytes,
        stored=stored_form(tensor.spec),
        form=form,
        converted_at=converted_at,
        absent=absent_weight(
            form.face() if isinstance(form, PackedForm) else form.blank(),
            tensor.places[0],
            reader,
            requires_grad=held is not None and held.requires_grad,
        ),
    )


def _piece(memory: torch.Tensor, start_bytes: int, form: Form | PackedForm) -> torch.Tensor:
    return memory[start_bytes : start_bytes + form.size_bytes]
