"""The modes of offloading as settings of the engine: how to cut, how much may be on the device.

| mode         | cut into                         | on the device at once                         |
|--------------|----------------------------------|-----------------------------------------------|
| `none`       | blocks                           | everything                                    |
| `stream`     | blocks                           | what the budget holds                         |
| `model`      | blocks                           | as much as the largest component of this mode |
| `group`      | as its parameters say            | two groups of the component                   |
| `sequential` | lowest layers                    | the largest layer of the component            |

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from offloadd.channel.specs import OffloadSpec
from offloadd.hosting.placing.offload_plan import Plan
from offloadd.offload.grouping.groups import Grouping, GroupOptions
from offloadd.offload.weights.casting import STORAGE_DTYPES, Casting
from offloadd.store.layout import align

_GROUPS_AT_ONCE = {"sequential": 1, "group": 2}
"""How many of its largest groups a component of these modes may have on the device."""


def group_options(offload: OffloadSpec) -> GroupOptions:
    """How a component of this mode is cut."""
    if offload.mode == "sequential":
        return GroupOptions("leaf_level")
    if offload.mode != "group":
        return GroupOptions()
    return GroupOptions(
        offload.offload_type or "block_level",
        offload.num_blocks_per_group or 1,
        tuple(offload.block_modules) if offload.block_modules is not None else None,
    )


def casting_of(offload: OffloadSpec) -> Casting | None:
    """What a component's large layers are stored in, if not in what they are computed in."""
    name = offload.storage_dtype
    if name is None:
        return None
    skip = offload.storage_skip
    return Casting(STORAGE_DTYPES[name], None if skip is None else tuple(skip))


def most_bytes(
    offload: OffloadSpec, grouping: Grouping, alignment_bytes: int, *, is_short: bool
) -> int | None:
    """What a component's weights may take of the device at most; None: what the budget gives.

    `is_short` says that the device's memory is the host's, and that the store had no room there.
    """
    usual = _GROUPS_AT_ONCE["group"] if is_short else None
    at_once = _GROUPS_AT_ONCE.get(offload.mode, usual)
    if at_once is None:
        return None
    largest = align(max(grouping.sizes_bytes(), default=0), alignment_bytes)
    return grouping.kept_bytes + at_once * largest


def whole_bytes(grouping: Grouping, alignment_bytes: int) -> int:
    """What all of a component's weights take of the device."""
    return grouping.kept_bytes + sum(align(one, alignment_bytes) for one in grouping.sizes_bytes())


def resting_on_disk(
    plan: Plan, component_bytes: Mapping[str, int], budget_bytes: int | None, on_cpu: bool
) -> dict[str, Path | None]:
    """The components whose weights are read from disk, and where their packs go if not the cache.

    A CPU's memory is the host's: what a budget keeps off the device has no other place to rest.
    """
    found: dict[str, Path | None] = {}
    is_short = budget_bytes is not None and budget_bytes < sum(component_bytes.values())
    for name, offload in plan.items():
        if offload.offload_to_disk_path is not None:
            found[name] = Path(offload.offload_to_disk_path)
        elif on_cpu and is_short:
            found[name] = None
    return found
