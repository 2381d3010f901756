"""Makes of a grouping what the executor drives: each group with its binding and its loader.

Where weights stay in the host's memory and are computed on there, only groups that have to be
converted need driving; they take nothing of the device but the scratch memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from offloadd.offload.grouping.grouping import Group, Grouping
from offloadd.offload.streaming.held import HeldLoader
from offloadd.offload.streaming.reads import StrayReads
from offloadd.offload.streaming.streamed import Streamed
from offloadd.offload.streaming.supply import Supply
from offloadd.offload.weights.binding import bind_group
from offloadd.offload.weights.scratch import Scratch


def streamed_groups(
    component: str,
    grouping: Grouping,
    modules: Mapping[str, nn.Module],
    supply: Supply,
    reads: StrayReads,
    scratch: Scratch,
) -> list[tuple[Group, Streamed]]:
    """The groups that are to be driven, in the grouping's order.

    `modules` are the component's by their paths; stray reads go through `reads`.
    """
    if supply.loader is None:
        wanted = [group for group in grouping.groups if group.converted_bytes]
    else:
        wanted = list(grouping.groups)
    driven: list[tuple[Group, Streamed]] = []
    for index, group in enumerate(wanted):
        start_bytes, stop_bytes = group.start_bytes, group.stop_bytes
        if supply.loader is None:
            held = supply.in_memory(start_bytes, stop_bytes)
            one = Streamed(
                component=component,
                index=index,
                name=group.name,
                start_bytes=start_bytes,
                stop_bytes=start_bytes,
                binding=bind_group(modules, grouping.layout, group, reads, scratch, held),
                loader=HeldLoader(),
                keep=True,
            )
        else:
            loader, start_bytes, stop_bytes = supply.loader_of(start_bytes, stop_bytes)
            one = Streamed(
                component=component,
                index=group.index,
                name=group.name,
                start_bytes=start_bytes,
                stop_bytes=stop_bytes,
                binding=bind_group(modules, grouping.layout, group, reads, scratch),
                loader=loader,
            )
        driven.append((group, one))
    return driven
