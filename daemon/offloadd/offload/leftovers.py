"""The tensors of a module that never leave the device: small weights and all buffers.

Promises: all weights of one `load` are on their way before the first is bound, so that a failure
leaves the module as it was; what stays already is not loaded again; weights count against the
budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offloadd.offload.absent import WeightReader
from offloadd.offload.binding import Binding, bind_tensor
from offloadd.offload.groups import TensorRef
from offloadd.offload.tier import DeviceTier, Region
from offloadd.offload.transfers import Loader
from offloadd.store.layout import Layout, align


class Leftovers:
    """What stays of one module, in regions of its own or where the host has it."""

    def __init__(self, layout: Layout, tier: DeviceTier, reader: WeightReader) -> None:
        self._layout = layout
        self._slots = layout.slots()
        self._tier = tier
        self._reader = reader
        self._bindings: dict[str, Binding] = {}
        self._regions: list[Region] = []

    @property
    def size_bytes(self) -> int:
        """What the weights take of the budget."""
        return sum(region.size_bytes for region in self._regions)

    def load(self, module: nn.Module, tensors: Sequence[TensorRef], loader: Loader) -> None:
        """Bring the weights among the tensors to the device for good."""
        wanted = [tensor for tensor in self._weights(tensors) if tensor.size_bytes]
        total_bytes = sum(align(tensor.size_bytes) for tensor in wanted)
        if not total_bytes:
            return
        region = self._tier.allocate(total_bytes)
        loads = []
        offset_bytes = 0
        try:
            for tensor in wanted:
                slot = self._slots[tensor.spec.name]
                piece = region.tensor[offset_bytes : offset_bytes + tensor.size_bytes]
                part = Region(piece, None, region.after)
                loads.append(loader.start(slot.offset_bytes, slot.stop_bytes, part))
                offset_bytes += align(tensor.size_bytes)
            for load in loads:
                load.wait()
        except BaseException:
            for load in loads:
                load.settle()
            self._tier.release(region)
            raise
        self._regions.append(region)
        for tensor, load in zip(wanted, loads, strict=True):
            self._bind(module, tensor, load.region.tensor)

    def use_in_place(
        self, module: nn.Module, tensors: Sequence[TensorRef], extent: torch.Tensor
    ) -> None:
        """Let the module compute on the host's own bytes."""
        for tensor in self._weights(tensors):
            slot = self._slots[tensor.spec.name]
            self._bind(module, tensor, extent[slot.offset_bytes : slot.stop_bytes])

    def unload(self) -> None:
        """Give the memory back; the weights are plain meta parameters then."""
        for binding in self._bindings.values():
            binding.unbind()
        self._bindings.clear()
        while self._regions:
            self._tier.release(self._regions.pop())

    def _weights(self, tensors: Sequence[TensorRef]) -> list[TensorRef]:
        return [
            tensor
            for tensor in tensors
            if tensor.spec.name in self._slots and tensor.spec.name not in self._bindings
        ]

    def _bind(self, module: nn.Module, tensor: TensorRef, region: torch.Tensor) -> None:
        binding = bind_tensor(module, self._layout, tensor, self._reader)
        binding.present(region)
        self._bindings[tensor.spec.name] = binding


def move_buffers(module: nn.Module, tensors: Sequence[TensorRef], device: torch.device) -> None:
    """Bring the buffers among the tensors to the device, where they stay: some are written to."""
    modules = dict(module.named_modules(remove_duplicate=False))
    for tensor in tensors:
        if tensor.kind == "buffer":
            buffer = modules[tensor.owner]._buffers[tensor.attribute]
            for path, attribute in tensor.places:
                modules[path]._buffers[attribute] = None if buffer is None else buffer.to(device)
