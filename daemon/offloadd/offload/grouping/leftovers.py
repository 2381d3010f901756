"""The tensors of a module that never leave the device: small weights and all buffers.

Promises: all weights of one `load` are on their way before the first is bound, so that a failure
leaves the module as it was; what stays already is not loaded again; weights count against the
budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from offloadd.offload.grouping.grouping import TensorRef
from offloadd.offload.streaming.tier import DeviceTier, Region
from offloadd.offload.streaming.transfers import Load, Loader
from offloadd.offload.weights.absent import WeightReader
from offloadd.offload.weights.binding import Binding, bind_tensor, convert
from offloadd.store.layout import Layout, align


class Leftovers:
    """What stays of one module, in regions of its own or where the host has it."""

    def __init__(self, layout: Layout, tier: DeviceTier, reader: WeightReader) -> None:
        self._slots = layout.slots()
        self._tier = tier
        self._reader = reader
        self._bindings: dict[str, Binding] = {}
        self._regions: list[Region] = []
        self._memory: dict[str, torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """What the weights take of the budget."""
        return sum(region.size_bytes for region in self._regions)

    def load(
        self, modules: Mapping[str, nn.Module], tensors: Sequence[TensorRef], loader: Loader
    ) -> None:
        """Bring the weights among the tensors to the device for good, in the form they are used in.

        Raises OutOfMemory or StorageFailed.
        """
        wanted = [tensor for tensor in self._weights(tensors) if tensor.size_bytes]
        if not wanted:
            return
        kept, pieces = self._allocate([tensor.kept_bytes for tensor in wanted])
        staging: Region | None = None
        loads: list[Load] = []
        try:
            converted = [tensor for tensor in wanted if tensor.converted_bytes]
            stages: dict[str, Region] = {}
            if converted:
                staging, parts = self._allocate([align(one.size_bytes) for one in converted])
                stages = {one.spec.name: part for one, part in zip(converted, parts, strict=True)}
            for tensor, piece in zip(wanted, pieces, strict=True):
                slot = self._slots[tensor.spec.name]
                target = stages.get(tensor.spec.name, piece)
                part = Region(target.tensor[: tensor.size_bytes], None, target.after)
                loads.append(loader.start(slot.offset_bytes, slot.stop_bytes, part))
            for load in loads:
                load.wait()
        except BaseException:
            for load in loads:
                load.settle()
            self._tier.release(kept)
            if staging is not None:
                self._tier.release(staging)
            raise
        self._regions.append(kept)
        for tensor, piece in zip(wanted, pieces, strict=True):
            if tensor.converted_bytes:
                convert(tensor, stages[tensor.spec.name].tensor, piece.tensor)
            self._memory[tensor.spec.name] = piece.tensor
            self._bind(modules, tensor, piece.tensor)
        if staging is not None:
            self._tier.release(staging)

    def use_in_place(
        self, modules: Mapping[str, nn.Module], tensors: Sequence[TensorRef], extent: torch.Tensor
    ) -> None:
        """Let the module compute on the host's own bytes, or on what these are converted into.

        Raises OutOfMemory when there is no memory to convert into.
        """
        wanted = self._weights(tensors)
        converted = [tensor for tensor in wanted if tensor.converted_bytes]
        memory: dict[str, torch.Tensor] = {}
        if converted:
            kept, pieces = self._allocate([tensor.kept_bytes for tensor in converted])
            self._regions.append(kept)
            memory = {
                one.spec.name: part.tensor for one, part in zip(converted, pieces, strict=True)
            }
        for tensor in wanted:
            slot = self._slots[tensor.spec.name]
            stored = extent[slot.offset_bytes : slot.stop_bytes]
            if tensor.converted_bytes:
                convert(tensor, stored, memory[tensor.spec.name])
                self._memory[tensor.spec.name] = memory[tensor.spec.name]
            self._bind(modules, tensor, memory.get(tensor.spec.name, stored))

    def exchange(
        self, modules: Mapping[str, nn.Module], tensor: TensorRef, stored: torch.Tensor
    ) -> None:
        """Let a weight that stays have other values; `stored` (uint8) is in host memory.

        Where the module computes on the host's bytes, it computes on those from now on.
        """
        memory = self._memory.get(tensor.spec.name)
        if memory is None:
            self._bind(modules, tensor, stored)
        elif tensor.converted_bytes:
            convert(tensor, stored.to(memory.device), memory)
        else:
            memory[: tensor.size_bytes].copy_(stored)

    def unload(self) -> None:
        """Give the memory back; the weights are plain meta parameters then."""
        for binding in self._bindings.values():
            binding.unbind()
        self._bindings.clear()
        self._memory.clear()
        while self._regions:
            self._tier.release(self._regions.pop())

    def _weights(self, tensors: Sequence[TensorRef]) -> list[TensorRef]:
        return [
            tensor
            for tensor in tensors
            if tensor.spec.name in self._slots and tensor.spec.name not in self._bindings
        ]

    def _allocate(self, sizes_bytes: Sequence[int]) -> tuple[Region, list[Region]]:
        """One region, and its pieces of these (aligned) sizes."""
        region = self._tier.allocate(sum(sizes_bytes))
        stops = list(accumulate(sizes_bytes))
        return region, [
            Region(region.tensor[stop - size : stop], None, region.after)
            for size, stop in zip(sizes_bytes, stops, strict=True)
        ]

    def _bind(
        self, modules: Mapping[str, nn.Module], tensor: TensorRef, memory: torch.Tensor
    ) -> None:
        binding = bind_tensor(modules, tensor, self._reader)
        binding.present(memory)
        self._bindings[tensor.spec.name] = binding


def move_buffers(
    modules: Mapping[str, nn.Module], tensors: Sequence[TensorRef], device: torch.device
) -> None:
    """Bring the buffers among the tensors to the device, where they stay: some are written to."""
    for tensor in tensors:
        if tensor.kind == "buffer":
            buffer = modules[tensor.owner]._buffers[tensor.attribute]
            for path, attribute in tensor.places:
                modules[path]._buffers[attribute] = None if buffer is None else buffer.to(device)
