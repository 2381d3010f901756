"""Where the bytes of each component are, put together from what the worker and the store know."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from offload_protocol.records import ComponentInfo, ModelInfo
from offloadd.channel.arena import Reading
from offloadd.channel.messages import Placed
from offloadd.control.memory.extents import Held


def located(
    info: ModelInfo,
    placed: Mapping[str, Placed],
    held: Mapping[str, Held],
    readings: Mapping[str, Reading],
) -> ModelInfo:
    """A model with its components' bytes as they are now.

    `placed` says where components (`MODEL/COMPONENT`) are as their worker sees it, `held` what they
    have in the store's memory, `readings` what was read from disk for them.
    """
    components = []
    for component in info.components:
        owner = owner_of(info.name, component.name)
        now = placed.get(owner)
        if now is not None:
            component = msgspec.structs.replace(component, **msgspec.structs.asdict(now))
        components.append(
            _located(component, held.get(owner, Held()), readings.get(owner, Reading()))
        )
    return msgspec.structs.replace(info, components=components)


def owner_of(model: str, component: str) -> str:
    """The name under which the store keeps accounts of a component."""
    return f"{model}/{component}"


def _located(info: ComponentInfo, held: Held, reading: Reading) -> ComponentInfo:
    host_bytes = held.host_bytes or info.host_bytes
    return msgspec.structs.replace(
        info,
        host_bytes=host_bytes,
        pinned_bytes=held.pinned_bytes,
        shared_bytes=held.shared_bytes,
        # Segments are whole pages, and so may be a little more than the weights.
        disk_bytes=max(info.bytes - host_bytes, 0),
        read_bytes=reading.size_bytes,
        read_bytes_per_s=round(reading.size_bytes / reading.busy_s) if reading.busy_s else 0,
    )
