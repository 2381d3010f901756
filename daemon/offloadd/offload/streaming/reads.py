"""Weights that are read while nothing has acquired their group: who reads them, and what to do.

Some modules read a child's weight instead of calling the child (`nn.MultiheadAttention` and its
`out_proj`), and helpers read parameters outside any forward; no hook fires there. `absent` makes
such a read right; this module remembers it and moves the weight to where its reader acquires it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn

from offloadd.offload.grouping.grouping import GroupDraft, Grouping, TensorRef, assemble
from offloadd.offload.grouping.ties import is_within
from offloadd.offload.weights.absent import Place

MERGED_RATIO = 4
"""Groups under one reader are merged up to this many times the largest group."""

SMALL_READ_BYTES = 1024 * 1024
"""A weight whose own module is called past its hooks becomes a leftover up to this size."""


@dataclass(frozen=True, slots=True)
class StrayRead:
    """The tensor at `place` (module path, attribute) was read while `reader` was running.

    `reader` is the path of the innermost module of the component whose forward was under way; None
    outside every forward.
    """

    place: Place
    reader: str | None


class StrayReads:
    """A `WeightReader` that fetches through `acquired` and remembers each read once.

    `acquired(place)` is a context in which the weight is present in its module.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        acquired: Callable[[Place], AbstractContextManager[torch.Tensor]],
    ) -> None:
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._device = device
        self._acquired = acquired
        self._reads: dict[StrayRead, None] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def reads(self) -> tuple[StrayRead, ...]:
        """All different reads so far, oldest first."""
        return tuple(self._reads)

    @contextmanager
    def reading(self, place: Place) -> Iterator[torch.Tensor]:
        """Note who reads and give the real weight."""
        self._reads[StrayRead(place, self._running_module())] = None
        with self._acquired(place) as weight:
            yield weight

    def _running_module(self) -> str | None:
        # Looking up the stack costs only the rare stray read; hooks would cost every call.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "forward":
                path: str | None = self._paths.get(id(frame.f_locals.get("self")))
                if path is not None:
                    return path
            frame = frame.f_back
        return None


def regroup(grouping: Grouping, reads: Iterable[StrayRead]) -> Grouping:
    """A grouping in which the readers find what they read; the layout stays.

    The reader becomes an anchor of the group that it reads. Where that would need two groups at
    once, the groups inside the reader are merged if they stay of a usual size; otherwise the tensor
    becomes a leftover, as does what is read outside every forward.
    """
    drafts = [GroupDraft(group.name, group.tensors, group.anchors) for group in grouping.groups]
    leftovers = list(grouping.leftovers)
    anchors_then = {
        place: group.anchors
        for group in grouping.groups
        for tensor in group.tensors
        for place in tensor.places
    }
    for read in reads:
        found = _find(read.place, drafts)
        if found is None:
            continue
        if read.reader is None or read.reader in anchors_then[read.place]:
            # No hook fires where this is read: outside every forward, or in one that is called
            # past its hooks. There a large weight is better fetched again each time.
            if read.reader is None or found[1].size_bytes <= SMALL_READ_BYTES:
                _evict(*found, drafts, leftovers)
        elif read.reader not in drafts[found[0]].anchors:
            _serve(read.reader, *found, drafts, leftovers)
    return assemble(grouping.layout, drafts, leftovers)


def _serve(
    reader: str,
    index: int,
    tensor: TensorRef,
    drafts: list[GroupDraft],
    leftovers: list[TensorRef],
) -> None:
    """Let the reader's forward acquire the tensor, or keep the tensor where it is always found."""
    draft = drafts[index]
    others = [other for other in drafts if other is not draft and _meets(other, reader)]
    if not others:
        drafts[index] = GroupDraft(draft.name, draft.tensors, (*draft.anchors, reader))
    elif _can_merge([draft, *others], reader, drafts):
        _merge([draft, *others], reader, drafts)
    else:
        _evict(index, tensor, drafts, leftovers)


def _find(place: Place, drafts: list[GroupDraft]) -> tuple[int, TensorRef] | None:
    for index, draft in enumerate(drafts):
        for tensor in draft.tensors:
            if place in tensor.places:
                return index, tensor
    return None


def _meets(draft: GroupDraft, reader: str) -> bool:
    """Whether the group is in use at some time while the reader runs."""
    return any(is_within(anchor, reader) or is_within(reader, anchor) for anchor in draft.anchors)


def _evict(
    index: int, tensor: TensorRef, drafts: list[GroupDraft], leftovers: list[TensorRef]
) -> None:
    draft = drafts[index]
    kept = tuple(other for other in draft.tensors if other is not tensor)
    drafts[index] = GroupDraft(draft.name, kept, draft.anchors)
    leftovers.append(tensor)


def _can_merge(parts: list[GroupDraft], reader: str, drafts: list[GroupDraft]) -> bool:
    inside = all(is_within(anchor, reader) for part in parts for anchor in part.anchors)
    largest = max(_size_bytes(draft) for draft in drafts)
    return inside and sum(_size_bytes(part) for part in parts) <= MERGED_RATIO * largest


def _size_bytes(draft: GroupDraft) -> int:
    return sum(tensor.size_bytes for tensor in draft.tensors)


def _merge(parts: list[GroupDraft], reader: str, drafts: list[GroupDraft]) -> None:
    """One group for all that lies inside the reader; drafts are in layout order and stay so."""
    ordered = [draft for draft in drafts if any(draft is part for part in parts)]
    tensors = tuple(tensor for draft in ordered for tensor in draft.tensors)
    anchors = dict.fromkeys([reader, *(anchor for draft in ordered for anchor in draft.anchors)])
    merged = GroupDraft(reader, tensors, tuple(anchors))
    place = next(index for index, draft in enumerate(drafts) if draft is ordered[0])
    drafts[place] = merged
    drafts[:] = [
        draft for draft in drafts if draft is merged or not any(draft is part for part in parts)
    ]
