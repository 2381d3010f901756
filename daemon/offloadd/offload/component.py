"""One module under the engine: its groups, what stays of it on the device, and its hooks.

Promises: after `attach_component` the module computes through the executor and holds no weight but
those that stay; after `Component.detach` hooks and device answers are as they were, every weight is
an absent (meta) one, and no memory of the device is held. The module is referred to weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.answers import answer_as_before, answer_device
from offloadd.offload.binding import Binding, bind_group, bind_tensor
from offloadd.offload.executor import Executor, Streamed
from offloadd.offload.groups import Grouping, TensorRef
from offloadd.offload.hooks import Hooks
from offloadd.offload.host_memory import bytes_of
from offloadd.offload.tier import DeviceTier, Region
from offloadd.offload.transfers import DmaLoader, Loader, ReadLoader
from offloadd.store.layout import Layout, align
from offloadd.store.source import WeightSource


@dataclass(slots=True, eq=False)
class Component:
    """An attached module; `in_place` says that its weights are used where the host has them."""

    name: str
    module: weakref.ref[nn.Module]
    grouping: Grouping
    groups: tuple[Streamed, ...]
    in_place: bool
    _source: WeightSource
    _tier: DeviceTier
    _executor: Executor
    _hooks: Hooks
    _leftovers: tuple[Binding, ...]
    _leftover_region: Region | None
    _unpin: Callable[[], None] | None

    def detach(self) -> None:
        """Let the module go; its weights are absent from now on."""
        self._hooks.remove()
        self._executor.remove(self.name)
        for binding in self._leftovers:
            binding.absent()
            binding.forget()
        if self._leftover_region is not None:
            self._tier.release(self._leftover_region)
            self._leftover_region = None
        module = self.module()
        if module is not None:
            answer_as_before(module)
        if self._unpin is not None:
            self._unpin()
        self._source.release_view()


def attach_component(
    name: str,
    module: nn.Module,
    grouping: Grouping,
    source: WeightSource,
    accelerator: Accelerator,
    tier: DeviceTier,
    executor: Executor,
) -> Component:
    """Take over a module whose weights (real or on meta) are those that the source gives.

    Parameters that stay are loaded, buffers moved to the device, everything else made absent.
    Raises ModelLoadFailed if the source is of another module, OutOfMemory or StorageFailed if what
    stays cannot be loaded; the module is then as it was.
    """
    if source.layout != grouping.layout:
        raise ModelLoadFailed(
            f"the weights for {name!r} are laid out for another module",
            hint="load the model again",
            details={"component": name},
        )
    view = source.host_view()
    extent = None if view is None else bytes_of(view)
    if extent is not None and not accelerator.has_dma:
        return _attach_in_place(name, module, grouping, source, extent, tier, executor)
    unpin = accelerator.pin(view) if view is not None else None
    loader = ReadLoader(source) if extent is None else DmaLoader(accelerator, extent)
    bindings = _leftover_bindings(module, grouping)
    try:
        region = _load_leftovers(grouping, loader, tier, bindings)
    except BaseException:
        if unpin is not None:
            unpin()
        source.release_view()
        raise
    _move_buffers(module, grouping, accelerator.device)
    groups = tuple(
        Streamed(
            component=name,
            index=group.index,
            name=group.name,
            start_bytes=group.start_bytes,
            stop_bytes=group.stop_bytes,
            binding=bind_group(module, grouping.layout, group),
            loader=loader,
        )
        for group in grouping.groups
    )
    for group in groups:
        group.binding.absent()
    hooks = Hooks()
    anchors = [(anchor, groups[g.index]) for g in grouping.groups for anchor in g.anchors]
    executor.add(name, groups)
    hooks.install(module, name, executor, anchors)
    answer_device(module, accelerator.device)
    return Component(
        name=name,
        module=weakref.ref(module),
        grouping=grouping,
        groups=groups,
        in_place=False,
        _source=source,
        _tier=tier,
        _executor=executor,
        _hooks=hooks,
        _leftovers=tuple(bindings.values()),
        _leftover_region=region,
        _unpin=unpin,
    )


def _attach_in_place(
    name: str,
    module: nn.Module,
    grouping: Grouping,
    source: WeightSource,
    extent: torch.Tensor,
    tier: DeviceTier,
    executor: Executor,
) -> Component:
    """Let the module compute on the host's own bytes: there is nothing to move."""
    everything = [tensor for group in grouping.groups for tensor in group.tensors]
    everything += _laid_out(grouping.layout, grouping.leftovers)
    slots = grouping.layout.slots()
    bindings = []
    for tensor in everything:
        slot = slots[tensor.spec.name]
        binding = bind_tensor(module, grouping.layout, tensor)
        binding.present(extent[slot.offset_bytes : slot.stop_bytes])
        bindings.append(binding)
    hooks = Hooks()
    executor.add(name, ())
    hooks.install(module, name, executor, ())
    return Component(
        name=name,
        module=weakref.ref(module),
        grouping=grouping,
        groups=(),
        in_place=True,
        _source=source,
        _tier=tier,
        _executor=executor,
        _hooks=hooks,
        _leftovers=tuple(bindings),
        _leftover_region=None,
        _unpin=None,
    )


def _laid_out(layout: Layout, tensors: tuple[TensorRef, ...]) -> list[TensorRef]:
    slots = layout.slots()
    return [tensor for tensor in tensors if tensor.spec.name in slots]


def _leftover_bindings(module: nn.Module, grouping: Grouping) -> dict[TensorRef, Binding]:
    return {
        tensor: bind_tensor(module, grouping.layout, tensor)
        for tensor in _laid_out(grouping.layout, grouping.leftovers)
    }


def _load_leftovers(
    grouping: Grouping, loader: Loader, tier: DeviceTier, bindings: dict[TensorRef, Binding]
) -> Region | None:
    """Bring what stays into one region and bind it, once all of it is on its way."""
    total_bytes = sum(align(tensor.size_bytes) for tensor in bindings)
    if not total_bytes:
        return None
    region = tier.allocate(total_bytes)
    slots = grouping.layout.slots()
    loads = []
    offset_bytes = 0
    try:
        for tensor in bindings:
            slot = slots[tensor.spec.name]
            piece = region.tensor[offset_bytes : offset_bytes + tensor.size_bytes]
            part = Region(piece, None, region.after)
            loads.append(loader.start(slot.offset_bytes, slot.stop_bytes, part))
            offset_bytes += align(tensor.size_bytes)
        for load in loads:
            load.wait()
    except BaseException:
        for load in loads:
            load.settle()
        tier.release(region)
        raise
    for binding, load in zip(bindings.values(), loads, strict=True):
        binding.present(load.region.tensor)
    return region


def _move_buffers(module: nn.Module, grouping: Grouping, device: torch.device) -> None:
    """Buffers never leave the device: they are small, and some are written to."""
    modules = dict(module.named_modules(remove_duplicate=False))
    for tensor in grouping.leftovers:
        if tensor.kind == "buffer":
            moved = modules[tensor.owner]._buffers[tensor.attribute]
            for path, attribute in tensor.places:
                modules[path]._buffers[attribute] = None if moved is None else moved.to(device)
