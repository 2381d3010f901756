"""Groups as data: what moves together, what stays, and how much memory either takes.

Promises: a group is one contiguous range of the layout; sizes count what converting a weight into
the form that its module wants takes besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offloadd.offload.weights.forms import Form
from offloadd.offload.weights.packed import PackedForm
from offloadd.store.layout import Layout, TensorSpec, align


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor's place in the module: `owner` is a module path (empty for the root).

    `aliases` are the other (module path, attribute) places that hold the same tensor. `size_bytes`
    is what the stored tensor takes without alignment, `form` how the module wants it (None for a
    buffer of a dtype that no layout holds).
    """

    owner: str
    attribute: str
    kind: Literal["parameter", "buffer"]
    spec: TensorSpec
    size_bytes: int
    form: Form | PackedForm | None
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Every (module path, attribute) that must be bound when the tensor moves."""
        return ((self.owner, self.attribute), *self.aliases)

    @property
    def converted_bytes(self) -> int:
        """What the form takes beside the stored bytes; 0 where those serve as they are."""
        if self.form is None or self.kind == "buffer" or self.form.is_stored_as(self.spec):
            return 0
        return align(self.form.size_bytes)

    @property
    def kept_bytes(self) -> int:
        """What it takes to keep the tensor in its form for good."""
        return self.converted_bytes or align(self.size_bytes)


@dataclass(frozen=True, slots=True)
class Group:
    """A run of units that move together.

    Entering the forward of any of `anchors` needs the group; it may be let go when the outermost
    entered anchor that lists it has been left. `units` are indices into the layout's units, and
    `start_bytes`, `stop_bytes` the range of the extent that holds all `tensors`. Bytes inside the
    range that belong to no tensor of the group (gaps, a leftover) are copied along and unused.
    """

    index: int
    name: str
    tensors: tuple[TensorRef, ...]
    anchors: tuple[str, ...]
    units: tuple[int, ...]
    start_bytes: int
    stop_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def converted_bytes(self) -> int:
        """Scratch memory for the tensors that are converted while the group is used."""
        return sum(tensor.converted_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Grouping:
    """All groups of a module in layout order; `leftover_bytes` counts what stays on the device."""

    layout: Layout
    groups: tuple[Group, ...]
    leftovers: tuple[TensorRef, ...]
    leftover_bytes: int

    def sizes_bytes(self) -> tuple[int, ...]:
        """The size of each group's range, by index."""
        return tuple(group.size_bytes for group in self.groups)

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory that any one group needs at most."""
        return max((group.converted_bytes for group in self.groups), default=0)

    @property
    def kept_bytes(self) -> int:
        """What must be on the device whatever is resident: leftover weights, and scratch memory."""
        weights = (tensor for tensor in self.leftovers if tensor.kind == "parameter")
        return self.scratch_bytes + sum(tensor.kept_bytes for tensor in weights)


@dataclass(frozen=True, slots=True)
class GroupDraft:
    """A group before its place in the layout is known; without tensors it comes to nothing."""

    name: str
    tensors: tuple[TensorRef, ...]
    anchors: tuple[str, ...]


def assemble(
    layout: Layout, drafts: Sequence[GroupDraft], leftovers: Sequence[TensorRef]
) -> Grouping:
    """Number the drafts that hold tensors, in layout order, and find their ranges."""
    places = {
        slot.spec.name: (index, slot)
        for index, unit in enumerate(layout.units)
        for slot in unit.tensors
    }
    groups: list[Group] = []
    for draft in drafts:
        if not draft.tensors:
            continue
        found = [places[tensor.spec.name] for tensor in draft.tensors]
        groups.append(
            Group(
                index=len(groups),
                name=draft.name,
                tensors=draft.tensors,
                anchors=draft.anchors,
                units=tuple(sorted({unit for unit, _ in found})),
                start_bytes=min(slot.offset_bytes for _, slot in found),
                stop_bytes=align(max(slot.stop_bytes for _, slot in found)),
            )
        )
    leftover_bytes = sum(align(tensor.size_bytes) for tensor in leftovers)
    return Grouping(layout, tuple(groups), tuple(leftovers), leftover_bytes)
