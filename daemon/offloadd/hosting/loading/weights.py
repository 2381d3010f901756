"""Where a component's weights come from: its files as they lie, or a pack that is written once.

Promises: bytes are taken straight from the original files when these hold what the module computes
with; every tensor that the files lack, or have in another shape, is named before any is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.offload.grouping.groups import module_layout
from offloadd.offload.grouping.ties import owned_tensors
from offloadd.offload.host_memory import view_of
from offloadd.offload.weights.casting import Casting
from offloadd.offload.weights.forms import DTYPES
from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import Layout, TensorSpec, lay_out
from offloadd.store.source import WeightSource


@dataclass(frozen=True, slots=True)
class Weights:
    """A component's weights in files that hold what its module computes with.

    `names` gives the files' name of a tensor where it differs from the layout's; `through` the
    dtype that a tensor is rounded to before it takes the layout's, where that is another one.
    """

    index: CheckpointIndex
    layout: Layout
    names: Mapping[str, str]
    through: Mapping[str, str]

    @property
    def is_direct(self) -> bool:
        """Whether the files have every tensor, buffers too, in the layout's dtype."""
        return not self.indirect and not self.index.unplaced

    @property
    def indirect(self) -> frozenset[str]:
        """The tensors that the files have in another dtype or arrangement."""
        return frozenset(
            name
            for name, slot in self.layout.slots().items()
            if (there := self.names.get(name, name)) in self.index.unplaced
            or self.index.tensors[there].spec.dtype != slot.spec.dtype
        )


def unmatched_weights(
    module: nn.Module, index: CheckpointIndex, casting: Casting | None
) -> Weights:
    """What a module wants of a checkpoint whose tensors only its class can read."""
    layout = module_layout(module, casting)
    stored = layout.slots()
    through = {
        name: slot.spec.dtype
        for name, slot in module_layout(module).slots().items()
        if slot.spec.dtype != stored[name].spec.dtype
    }
    return Weights(index, layout, {}, through)


def match_weights(
    module: nn.Module,
    names: Mapping[str, str],
    index: CheckpointIndex,
    casting: Casting | None = None,
) -> Weights:
    """Find each weight of a module in a checkpoint.

    With a casting, what is cast is wanted in the storage dtype. Raises `ModelLoadFailed` that names
    every missing and every mis-shaped tensor.
    """
    found: dict[str, str] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    saved = module.state_dict().keys()
    for tensor in owned_tensors(module):
        if tensor.kind == "buffer" and tensor.name not in saved:
            continue
        places = [tensor.name, *(f"{path}.{one}" if path else one for path, one in tensor.aliases)]
        there = next((names[place] for place in places if place in names), None)
        if there is None and tensor.kind == "buffer" and _may_be_missing(module, tensor.name):
            continue
        found[tensor.name] = there or tensor.name
        wanted[found[tensor.name]] = tensor.spec.shape
    index.require(wanted)
    return replace(unmatched_weights(module, index, casting), names=found)


def stored_buffers(module: nn.Module, weights: Weights) -> Weights:
    """Those buffers of a module that the files hold, as they are stored there."""
    index, names = weights.index, weights.names
    held = dict(module.named_buffers())
    return _buffers(
        index,
        {
            name: names.get(name, name)
            for name in module.state_dict()
            if name in held and names.get(name, name) in index.tensors
        },
    )


def loaded_buffers(module: nn.Module, weights: Weights) -> Weights:
    """All buffers of a module, as the pack holds them that its class loaded.

    Raises `ModelLoadFailed` where the pack lacks one that only loading gives a value, or has one
    that the module does not know.
    """
    index = weights.index
    held = dict(module.named_buffers())
    if surplus := sorted(index.tensors.keys() - held.keys() - weights.layout.slots().keys()):
        raise ModelLoadFailed(
            f"loading gives {type(module).__name__} a buffer {surplus[0]!r}, which its "
            "configuration does not give it",
            hint="models whose parts depend on more than config.json are not hosted",
            details={"tensors": surplus},
        )
    index.require(
        {
            name: tuple(one.shape)
            for name, one in held.items()
            if one.is_meta or name in index.tensors
        }
    )
    return _buffers(index, {name: name for name in held if name in index.tensors})


def _buffers(index: CheckpointIndex, wanted: dict[str, str]) -> Weights:
    specs = [
        TensorSpec(name, index.tensors[there].spec.dtype, index.tensors[there].spec.shape)
        for name, there in wanted.items()
    ]
    return Weights(index, lay_out([("", specs)]), wanted, {})


def fill_buffers(module: nn.Module, source: WeightSource, *, as_stored: bool = False) -> None:
    """Copy buffers into a module; each keeps the dtype that it was built with, or is stored in."""
    layout = source.layout
    memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    source.read(0, layout.size_bytes, view_of(memory)).result()
    for name, slot in layout.slots().items():
        stored = memory[slot.offset_bytes : slot.stop_bytes].view(DTYPES[slot.spec.dtype])
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        dtype = stored.dtype if as_stored else owner.get_buffer(attribute).dtype
        owner._buffers[attribute] = stored.reshape(slot.spec.shape).to(dtype, copy=True)


def _may_be_missing(module: nn.Module, name: str) -> bool:
    """Whether its library means the constructor's value where no file holds the buffer."""
    patterns = getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
