"""What moves together: the groups of a module, and the leftovers that never leave the device.

Promises: every parameter and buffer of the module belongs to exactly one group or to the leftovers;
a group is one contiguous range of the layout, so that one copy moves it; the layout depends on the
module alone, never on the options; no anchor of one group is or lies inside an anchor of another,
so that groups are needed one after the other and ring places can be freed in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from offload_protocol.errors import InvalidRequest
from offloadd.offload.grouping.blocks import Cut, ModuleSizes, block_cuts, layer_cuts, read_ahead
from offloadd.offload.grouping.grouping import GroupDraft, TensorRef, assemble
from offloadd.offload.grouping.grouping import Grouping as Grouping
from offloadd.offload.grouping.ties import OwnedTensor, is_within, owned_tensors
from offloadd.offload.weights.casting import Casting, StoredAs, store_cast
from offloadd.store.layout import Layout, TensorSpec, lay_out

SMALL_LIMIT_BYTES = 1024 * 1024
SMALL_SHARE = 1 / 32

OffloadType = Literal["block_level", "leaf_level"]


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How to cut a module into groups.

    `block_modules` names modules (a path, or its last part) in which alone blocks are looked for.
    A layer outside the blocks of at most `small_limit_bytes` stays on the device; None chooses the
    largest limit up to 1 MiB with which the small layers are at most 1/32 of all bytes.
    """

    offload_type: OffloadType = "block_level"
    num_blocks_per_group: int = 1
    block_modules: tuple[str, ...] | None = None
    small_limit_bytes: int | None = None


def module_layout(module: nn.Module, casting: Casting | StoredAs | None = None) -> Layout:
    """The layout of a module's parameters: one unit for each module that owns some.

    Tied parameters are laid out once, with their owner; with a casting, what is cast is laid out
    in the storage dtype. Raises as `group_module`.
    """
    return _lay_out(_stored_tensors(module, casting))


def group_module(
    module: nn.Module, options: GroupOptions, casting: Casting | StoredAs | None = None
) -> Grouping:
    """Cut a module, whose parameters may be on meta, into groups and leftovers.

    Buffers, parameters that the root owns itself (its helper methods read them outside any
    forward), layers that a container reads before it calls them, small layers outside the blocks,
    small parameters of modules that have other layers inside, and tied tensors that two groups
    would need at once are leftovers.

    Raises ModelLoadFailed naming a tensor that cannot be streamed, InvalidRequest for options that
    fit no module.
    """
    if options.num_blocks_per_group < 1:
        raise InvalidRequest(f"num_blocks_per_group is {options.num_blocks_per_group}, below 1.")
    owned = _stored_tensors(module, casting)
    layout = _lay_out(owned)
    own_bytes: dict[str, int] = defaultdict(int)
    for tensor in owned:
        if tensor.kind == "parameter":
            own_bytes[tensor.owner] += tensor.size_bytes
    sizes = ModuleSizes(module, own_bytes)
    if options.offload_type == "block_level":
        cuts = block_cuts(module, sizes, options.num_blocks_per_group, options.block_modules)
    else:
        cuts = layer_cuts(module, sizes)
    small = _small_cuts(cuts, sizes, options.small_limit_bytes)
    ahead = read_ahead(module)
    kept = [cut for cut in cuts if cut not in small and not ahead.intersection(cut.roots)]
    return _share_out(layout, owned, kept, _canonical_paths(module))


def _stored_tensors(
    module: nn.Module, casting: Casting | StoredAs | None
) -> tuple[OwnedTensor, ...]:
    owned = owned_tensors(module)
    if casting is not None:
        store_cast(module, owned, casting)
    return owned


def _lay_out(owned: Sequence[OwnedTensor]) -> Layout:
    units: dict[str, list[TensorSpec]] = {}
    for tensor in owned:
        if tensor.kind == "parameter":
            units.setdefault(tensor.owner, []).append(tensor.spec)
    return lay_out(list(units.items()))


def _small_cuts(cuts: Sequence[Cut], sizes: ModuleSizes, limit_bytes: int | None) -> set[Cut]:
    """The cuts outside blocks that stay on the device."""
    layers = sorted(
        (cut for cut in cuts if not cut.is_block), key=lambda cut: sizes.of(cut.roots[0])
    )
    if limit_bytes is not None:
        return {cut for cut in layers if sizes.of(cut.roots[0]) <= limit_bytes}
    allowance = SMALL_SHARE * sizes.of("")
    small: set[Cut] = set()
    by_size: dict[int, list[Cut]] = defaultdict(list)
    for cut in layers:
        by_size[sizes.of(cut.roots[0])].append(cut)
    for size, equals in by_size.items():
        # Layers of one size are treated alike, or a limit would depend on the order of layers.
        allowance -= size * len(equals)
        if size > SMALL_LIMIT_BYTES or allowance < 0:
            break
        small.update(equals)
    return small


def _canonical_paths(module: nn.Module) -> dict[str, str]:
    """Each module path, also that of a module registered twice, to the first path of its object."""
    first: dict[int, str] = {}
    return {
        path: first.setdefault(id(child), path)
        for path, child in module.named_modules(remove_duplicate=False)
    }


def _share_out(
    layout: Layout, owned: Sequence[OwnedTensor], cuts: Sequence[Cut], canonical: dict[str, str]
) -> Grouping:
    cut_of_root = {root: cut for cut in cuts for root in cut.roots}
    members: dict[Cut, list[OwnedTensor]] = {cut: [] for cut in cuts}
    leftovers: list[OwnedTensor] = []
    anchors: dict[Cut, list[str]] = {cut: list(cut.roots) for cut in cuts}
    home = {
        id(tensor): _enclosing(tensor.owner, cut_of_root)
        for tensor in owned
        if tensor.kind == "parameter"
    }
    filled = {cut for root in home.values() if root is not None for cut in [cut_of_root[root]]}
    for tensor in owned:
        root = home.get(id(tensor))
        if root is None:
            leftovers.append(tensor)
            continue
        cut = cut_of_root[root]
        readers = _alias_anchors(tensor, cut, cut_of_root, canonical)
        if any(_collides(reader, cut, cut_of_root, filled) for reader in readers):
            leftovers.append(tensor)
            continue
        members[cut].append(tensor)
        anchors[cut].extend(reader for reader in readers if reader not in anchors[cut])
    drafts = [
        GroupDraft(
            _name(cut.roots),
            tuple(_reference(tensor) for tensor in members[cut]),
            tuple(anchors[cut]),
        )
        for cut in cuts
    ]
    return assemble(layout, drafts, [_reference(tensor) for tensor in leftovers])


def _alias_anchors(
    tensor: OwnedTensor, home: Cut, cut_of_root: dict[str, Cut], canonical: dict[str, str]
) -> list[str]:
    """The modules outside its own cut whose forward reads a tied tensor."""
    readers: dict[str, None] = {}
    for path, _ in tensor.aliases:
        root = _enclosing(path, cut_of_root)
        reader = canonical[path] if root is None else root
        if reader not in home.roots:
            readers[reader] = None
    return list(readers)


def _enclosing(path: str, cut_of_root: dict[str, Cut]) -> str | None:
    """The cut root at or above a module path."""
    while path not in cut_of_root:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def _collides(reader: str, home: Cut, cut_of_root: dict[str, Cut], filled: set[Cut]) -> bool:
    """Whether another group is in use while `reader` runs."""
    return any(
        cut is not home and cut in filled and (is_within(root, reader) or is_within(reader, root))
        for root, cut in cut_of_root.items()
    )


def _reference(tensor: OwnedTensor) -> TensorRef:
    return TensorRef(
        tensor.owner,
        tensor.attribute,
        tensor.kind,
        tensor.spec,
        tensor.size_bytes,
        tensor.form,
        tuple(tensor.aliases),
    )


def _name(roots: Sequence[str]) -> str:
    """One name for a run of modules: `blocks.4`, or `blocks.4-blocks.7`."""
    return roots[0] if len(roots) == 1 else f"{roots[0]}-{roots[-1]}"
