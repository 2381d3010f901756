"""Where a module is cut: its repeated blocks at any depth, and the lowest layers outside them.

A cut is a run of modules whose subtrees move together; cuts are disjoint and in module order, so
that each covers one contiguous range of the layout. Only the module tree and sizes are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from offload_protocol.errors import InvalidRequest
from offloadd.offload.grouping.ties import dotted, is_within

SPLIT_SHARE = 1 / 16
"""A block over this share of the module's bytes is split at the blocks inside it, if it has any."""

WHOLE_SUBTREE_RATIO = 4
"""A module with large parameters of its own moves whole if it is at most this many times larger."""


READ_THEIR_CHILDREN = (nn.TransformerEncoderLayer,)
"""Layers that read what is inside them without calling it, and must find it there."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Modules that move together; `roots` are their paths, `is_block` whether they are blocks."""

    roots: tuple[str, ...]
    is_block: bool


class ModuleSizes:
    """Bytes of owned parameters: of a module alone, and of its whole subtree."""

    def __init__(self, module: nn.Module, own_bytes: Mapping[str, int]) -> None:
        self.own_bytes = own_bytes
        self.subtree_bytes: dict[str, int] = dict.fromkeys(
            (path for path, _ in module.named_modules()), 0
        )
        for path, size in own_bytes.items():
            parts = path.split(".") if path else []
            for depth in range(len(parts) + 1):
                self.subtree_bytes[".".join(parts[:depth])] += size

    def of(self, path: str) -> int:
        return self.subtree_bytes.get(path, 0)


def block_cuts(
    module: nn.Module,
    sizes: ModuleSizes,
    num_blocks_per_group: int,
    block_modules: Sequence[str] | None,
) -> list[Cut]:
    """Cuts at block level, in module order: runs of blocks, and the lowest layers around them.

    Raises InvalidRequest if a name of `block_modules` is no module that holds weights.
    """
    roots = _search_roots(module, sizes, block_modules)
    runs = [run for root in roots for run in _block_runs(module, root, sizes)]
    cuts = [
        Cut(tuple(run[start : start + num_blocks_per_group]), True)
        for run in runs
        for start in range(0, len(run), num_blocks_per_group)
    ]
    blocks = {root for cut in cuts for root in cut.roots}
    return _in_module_order(module, cuts + layer_cuts(module, sizes, blocks))


def layer_cuts(
    module: nn.Module, sizes: ModuleSizes, outside: frozenset[str] | set[str] = frozenset()
) -> list[Cut]:
    """One cut for each lowest layer that is not inside one of the modules `outside`."""
    cuts: list[Cut] = []

    def visit(path: str, child: nn.Module) -> None:
        if path in outside or not sizes.of(path):
            return
        inner = [(dotted(path, name), grandchild) for name, grandchild in child.named_children()]
        own = sizes.own_bytes.get(path, 0)
        is_lowest = own == sizes.of(path)
        holds_block = any(is_within(block, path) for block in outside)
        if (
            is_lowest
            or isinstance(child, READ_THEIR_CHILDREN)
            or (own and path and not holds_block and sizes.of(path) <= WHOLE_SUBTREE_RATIO * own)
        ):
            if path or type(child).__module__.startswith("torch.nn."):
                cuts.append(Cut((path,), False))
            return
        for inner_path, grandchild in inner:
            visit(inner_path, grandchild)

    visit("", module)
    return cuts


def read_ahead(module: nn.Module) -> set[str]:
    """Paths of layers that a container looks into before it calls them.

    `nn.TransformerEncoder` decides by its first layer's weights whether to pad in another way.
    """
    return {
        dotted(path, "layers.0")
        for path, child in module.named_modules()
        if isinstance(child, nn.TransformerEncoder) and child.use_nested_tensor
    }


def _search_roots(
    module: nn.Module, sizes: ModuleSizes, block_modules: Sequence[str] | None
) -> list[str]:
    """The outermost modules in which blocks are looked for."""
    if block_modules is None:
        return [""]
    found: list[str] = []
    for name in block_modules:
        matches = [
            path
            for path, size in sizes.subtree_bytes.items()
            if size and path and (path == name or path.rpartition(".")[2] == name)
        ]
        if not matches:
            children = ", ".join(child for child, _ in module.named_children())
            raise InvalidRequest(
                f"block_modules names `{name}`, but {type(module).__name__} has no such module "
                "with weights.",
                hint=f"Its children are: {children}.",
                details={"block_module": name},
            )
        found.extend(matches)
    return [
        path
        for path in dict.fromkeys(found)
        if not any(path != other and is_within(path, other) for other in found)
    ]


def _block_runs(module: nn.Module, path: str, sizes: ModuleSizes) -> list[list[str]]:
    """Runs of neighbouring blocks at or below `path`."""
    child = module.get_submodule(path)
    if not sizes.of(path):
        return []
    if not _is_block_list(child, path, sizes):
        return [
            run
            for name, _ in child.named_children()
            for run in _block_runs(module, dotted(path, name), sizes)
        ]
    runs: list[list[str]] = [[]]
    for name, member in child.named_children():
        member_path = dotted(path, name)
        if not _is_composite(member_path, sizes):
            runs.append([])
        elif _must_split(module, member_path, sizes):
            inner = [
                run
                for inner_name, _ in member.named_children()
                for run in _block_runs(module, dotted(member_path, inner_name), sizes)
            ]
            runs.extend([*inner, []])
        else:
            runs[-1].append(member_path)
    return [run for run in runs if run]


def _is_block_list(child: nn.Module, path: str, sizes: ModuleSizes) -> bool:
    """Whether it lists two or more modules of one class that consist of layers."""
    if not isinstance(child, nn.ModuleList | nn.Sequential):
        return False
    classes = Counter(
        type(member)
        for name, member in child.named_children()
        if _is_composite(dotted(path, name), sizes)
    )
    return max(classes.values(), default=0) >= 2


def _is_composite(path: str, sizes: ModuleSizes) -> bool:
    return sizes.of(path) > sizes.own_bytes.get(path, 0)


def _must_split(module: nn.Module, path: str, sizes: ModuleSizes) -> bool:
    """Whether a block is large for its module and mostly made of smaller blocks itself."""
    if sizes.of(path) <= SPLIT_SHARE * sizes.of(""):
        return False
    inner = sum(
        sizes.of(block)
        for name, _ in module.get_submodule(path).named_children()
        for run in _block_runs(module, dotted(path, name), sizes)
        for block in run
    )
    return inner * 2 >= sizes.of(path)


def _in_module_order(module: nn.Module, cuts: list[Cut]) -> list[Cut]:
    place = {path: index for index, (path, _) in enumerate(module.named_modules())}
    return sorted(cuts, key=lambda cut: place[cut.roots[0]])
