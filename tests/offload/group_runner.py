"""The least that can run a grouping: a group is present while one of its anchors is entered.

It shares nothing with the executor but the types, so that groupings are judged on their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offloadd.offload.grouping.grouping import Group, Grouping
from offloadd.offload.streaming.reads import StrayReads
from offloadd.offload.weights.absent import AbsentWeight, Place, absent_weight


class GroupRunner:
    """Makes every grouped weight of a module absent except between an anchor's entry and exit."""

    def __init__(self, module: nn.Module, grouping: Grouping) -> None:
        self.acquired: list[int] = []
        self.in_use: dict[int, int] = {}
        self.most_in_use = 0
        self.reads = StrayReads(module, torch.device("cpu"), self._acquired)
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self._groups = grouping.groups
        self._of_place = {
            place: group
            for group in grouping.groups
            for tensor in group.tensors
            for place in tensor.places
        }
        self._real = {
            (path, attribute): self._modules[path]._parameters[attribute]
            for path, attribute in self._of_place
        }
        for group in grouping.groups:
            self._leave(group)
            for anchor in group.anchors:
                self._hook(self._modules[anchor], group)

    def _hook(self, anchor: nn.Module, group: Group) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            self._acquire(group)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._release(group)

        anchor.register_forward_pre_hook(enter, prepend=True)
        anchor.register_forward_hook(leave, always_call=True)

    def _acquire(self, group: Group) -> None:
        self.in_use[group.index] = self.in_use.get(group.index, 0) + 1
        self.acquired.append(group.index)
        self.most_in_use = max(self.most_in_use, len(self.in_use))
        for path, attribute in self._places(group):
            self._modules[path]._parameters[attribute] = self._real[path, attribute]

    def _release(self, group: Group) -> None:
        self.in_use[group.index] -= 1
        if not self.in_use[group.index]:
            del self.in_use[group.index]
            self._leave(group)

    def _leave(self, group: Group) -> None:
        for tensor in group.tensors:
            real = self._real[tensor.places[0]]
            assert real is not None
            blank = torch.empty_like(real, device="meta")
            weight = absent_weight(blank, tensor.places[0], self.reads)
            for path, attribute in tensor.places:
                self._modules[path]._parameters[attribute] = weight

    def _places(self, group: Group) -> list[Place]:
        return [place for tensor in group.tensors for place in tensor.places]

    @contextmanager
    def _acquired(self, place: Place) -> Iterator[torch.Tensor]:
        real = self._real[place]
        assert real is not None
        assert not isinstance(real, AbsentWeight)
        yield real
