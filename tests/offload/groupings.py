"""What tests of groupings share: options, a chain of blocks, and what makes a grouping sound."""

from __future__ import annotations

import pytest
import torch
from offload.tiny_models import TINY_MODELS
from torch import nn

from offloadd.offload.grouping.grouping import Grouping
from offloadd.offload.grouping.groups import GroupOptions
from offloadd.offload.grouping.ties import is_within

FAMILIES = sorted(TINY_MODELS)
OPTIONS = [
    GroupOptions("block_level"),
    GroupOptions("block_level", num_blocks_per_group=2),
    GroupOptions("leaf_level"),
    GroupOptions("leaf_level", small_limit_bytes=0),
]
every_family = pytest.mark.parametrize("family", FAMILIES)
every_option = pytest.mark.parametrize(
    "options", OPTIONS, ids=["block", "two_blocks", "leaf", "every_leaf"]
)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.lin(x))
        return result


class Chain(nn.Module):
    def __init__(self, count: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(count)])
        self.register_buffer("scale", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def on_meta(module: nn.Module) -> nn.Module:
    """Parameters without memory, tied as before."""
    blanks: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                blank = nn.Parameter(torch.empty_like(parameter, device="meta"), False)
                child._parameters[name] = blanks.setdefault(id(parameter), blank)
    return module


def assert_sound(module: nn.Module, grouping: Grouping) -> None:
    """Every tensor once, ranges that hold their tensors and do not overlap, anchors that differ."""
    places = [
        (path, name)
        for path, child in module.named_modules(remove_duplicate=False)
        for name, tensor in (*child._parameters.items(), *child._buffers.items())
        if tensor is not None
    ]
    tensors = [tensor for group in grouping.groups for tensor in group.tensors]
    held = [place for tensor in (*tensors, *grouping.leftovers) for place in tensor.places]
    assert sorted(held) == sorted(places)
    assert all(tensor.kind == "parameter" for tensor in tensors)

    slots = grouping.layout.slots()
    stop_bytes = 0
    for index, group in enumerate(grouping.groups):
        assert group.index == index
        assert group.start_bytes >= stop_bytes
        stop_bytes = group.stop_bytes
        assert stop_bytes <= grouping.layout.size_bytes
        owners = {grouping.layout.units[unit].name for unit in group.units}
        assert owners == {tensor.owner for tensor in group.tensors}
        for tensor in group.tensors:
            slot = slots[tensor.spec.name]
            assert group.start_bytes <= slot.offset_bytes
            assert slot.stop_bytes <= stop_bytes

    anchors = [(anchor, group.index) for group in grouping.groups for anchor in group.anchors]
    for anchor, group_index in anchors:
        assert not any(other != group_index and is_within(path, anchor) for path, other in anchors)
