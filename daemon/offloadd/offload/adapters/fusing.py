"""Fuses adapters into derived weights, group by group, and takes them apart again.

Promises: the numbers are those of the adapter library's own merge on the execution device, since
that is what runs, on a copy of each weight; the base is read, never written, so that taking apart
gives the model that was never fused, bit for bit (subtracting, as the library does, would not).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from offload_protocol.errors import InvalidRequest, OutOfMemory
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.adapters.adapters import rolled_back
from offloadd.offload.component import Component
from offloadd.offload.grouping.grouping import TensorRef
from offloadd.offload.host_memory import view_of
from offloadd.offload.weights.packed import PackedForm
from offloadd.store.derived_source import DerivedSource, Range


class AdapterLayer(Protocol):
    """What peft's layers offer; `base_layer` is the hosted layer inside."""

    merged_adapters: list[str]
    scaling: dict[str, float]

    def get_base_layer(self) -> nn.Module: ...

    def scale_layer(self, scale: float) -> None: ...

    def merge(self, safe_merge: bool, adapter_names: list[str] | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Fused:
    """The derived weights, and how to undo what fusing did to the adapter layers."""

    source: DerivedSource
    layers: tuple[tuple[AdapterLayer, dict[str, float]], ...]
    unpins: tuple[Callable[[], None], ...]

    def undo(self) -> None:
        """Let the adapter layers add their part again, as before; frees nothing by itself."""
        for layer, scaling in self.layers:
            layer.merged_adapters.clear()
            layer.scaling.clear()
            layer.scaling.update(scaling)
        for unpin in self.unpins:
            unpin()


def fuse_adapters(
    component: Component,
    accelerator: Accelerator,
    adapter_names: Sequence[str] | None,
    scale: float,
    *,
    safe: bool,
) -> Fused:
    """Make derived weights of all layers that have any of the adapters (None: the active ones).

    `scale` multiplies what adapters add; `safe` refuses numbers that are not finite. The component
    does not use them yet. Raises InvalidRequest when nothing can be fused or the adapters do not
    fit, OutOfMemory, StorageFailed; then nothing has changed.
    """
    module = component.module()
    layers = [] if module is None else list(_adapter_layers(module))
    if module is None or not layers:
        raise InvalidRequest("there is no adapter to fuse", hint="load one first")
    if any(layer.merged_adapters for layer in layers):
        raise InvalidRequest("adapters are fused already", hint="unfuse them first")
    before = tuple((layer, dict(layer.scaling)) for layer in layers)
    names = None if adapter_names is None else list(adapter_names)
    refs = _by_place(component)
    fused: dict[str, torch.Tensor] = {}
    with rolled_back([module]):
        for layer in layers:
            if scale != 1.0:
                layer.scale_layer(scale)
            for tensor, weight in _merged(component, layer, refs, names, safe):
                fused[tensor.spec.name] = _stored_bytes(weight)
        if not fused:
            raise InvalidRequest(
                f"none of the adapters {names} is loaded" if names else "no adapter is active",
                hint="name adapters that were loaded",
            )
        ranges = _ranges(component, fused)
    pin = accelerator.pin if accelerator.has_dma else None
    unpins = [pin(view) for view in ranges.values()] if pin is not None else []
    source = DerivedSource(component.source, ranges)
    return Fused(source, before, tuple(unpin for unpin in unpins if unpin is not None))


def _adapter_layers(module: nn.Module) -> Iterator[AdapterLayer]:
    for child in module.modules():
        if hasattr(child, "base_layer") and hasattr(child, "merged_adapters"):
            yield cast(AdapterLayer, child)


def _by_place(component: Component) -> dict[tuple[int, str], TensorRef]:
    modules = component.modules()
    return {
        (id(modules[path]), attribute): tensor
        for tensor in component.tensors()
        for path, attribute in tensor.places
        if path in modules
    }


def _merged(
    component: Component,
    layer: AdapterLayer,
    refs: dict[tuple[int, str], TensorRef],
    names: list[str] | None,
    safe: bool,
) -> list[tuple[TensorRef, torch.Tensor]]:
    """The weights of one layer with adapters merged into copies of them."""
    base = layer.get_base_layer()
    mine = {
        attribute: refs[id(base), attribute]
        for attribute in base._parameters
        if (id(base), attribute) in refs
    }
    for tensor in mine.values():
        if isinstance(tensor.form, PackedForm):
            raise InvalidRequest(
                f"`{tensor.spec.name}` is quantised, and adapters cannot be fused into it",
                hint="use the adapter unfused, or host the component without quantization",
            )
        if tensor.form is None or tensor.form.dtype != tensor.spec.dtype:
            raise InvalidRequest(
                f"`{tensor.spec.name}` is stored in {tensor.spec.dtype}, which adapters cannot be "
                "fused into",
                hint="use the adapter unfused, or host the component without storage_dtype",
            )
    with _copied(component, base, mine):
        layer.merge(safe_merge=safe, adapter_names=names)
        if not layer.merged_adapters:
            return []
        return [(tensor, base.get_parameter(name).detach()) for name, tensor in mine.items()]


@contextmanager
def _copied(component: Component, base: nn.Module, mine: dict[str, TensorRef]) -> Iterator[None]:
    """Copies in the places of a layer's weights, which can be written to."""
    with ExitStack() as stack, torch.no_grad():
        for name, tensor in mine.items():
            weight = stack.enter_context(component.present(tensor))
            stack.callback(base._parameters.__setitem__, name, base._parameters[name])
            base._parameters[name] = nn.Parameter(weight.detach().clone(), requires_grad=False)
        yield


def _stored_bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.to("cpu").contiguous().view(-1).view(torch.uint8)


def _ranges(component: Component, fused: dict[str, torch.Tensor]) -> dict[Range, memoryview]:
    """Whole groups of derived bytes, and single leftover weights."""
    grouping = component.grouping
    slots = grouping.layout.slots()
    wanted = {
        (group.start_bytes, group.stop_bytes)
        for group in grouping.groups
        if any(tensor.spec.name in fused for tensor in group.tensors)
    }
    for tensor in grouping.leftovers:
        if tensor.spec.name in fused:
            slot = slots[tensor.spec.name]
            wanted.add((slot.offset_bytes, slot.stop_bytes))
    ranges: dict[Range, memoryview] = {}
    for start, stop in sorted(wanted):
        view = ranges[start, stop] = _memory(stop - start)
        component.source.read(start, stop, view).result()
        for name, stored in fused.items():
            slot = slots[name]
            if start <= slot.offset_bytes and slot.stop_bytes <= stop:
                low, high = slot.offset_bytes - start, slot.stop_bytes - start
                view[low:high] = view_of(stored)
    return ranges


def _memory(size_bytes: int) -> memoryview:
    try:
        # A mapping of its own is of exact size and starts on a page, so that it can be page-locked.
        return memoryview(mmap.mmap(-1, size_bytes))
    except OSError as error:
        raise OutOfMemory(
            f"the host has no {size_bytes} bytes for fused weights",
            hint="use the adapter unfused, which needs no copy of the weights",
            details={"needed_bytes": size_bytes},
        ) from error
