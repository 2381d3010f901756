"""What `auto` means: the fastest way of offloading whose weights fit the device. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from offloadd.channel.specs import OffloadSpec

ACTIVATIONS_SHARE = 0.25
"""Part of the free device memory that is left to activations; a picture of 1024 pixels square takes
2 to 5 GB in the common models, whose weights are 5 to 25 GB."""


def choose_offload(
    component_bytes: Mapping[str, int], free_device_bytes: int, free_host_bytes: int, on_cpu: bool
) -> OffloadSpec:
    """The mode for a pipeline whose components take `component_bytes` each.

    On a CPU the weights are computed on where they lie. Elsewhere: `none` if all components fit
    together, `model` if the largest one fits, else `group` by layers, streamed if the host can
    hold the page-locked copies as well.
    """
    if on_cpu or not component_bytes:
        return OffloadSpec(mode="none")
    room = free_device_bytes * (1 - ACTIVATIONS_SHARE)
    if sum(component_bytes.values()) <= room:
        return OffloadSpec(mode="none")
    if max(component_bytes.values()) <= room:
        return OffloadSpec(mode="model")
    # torch rounds page-locked memory up to powers of two, and the originals stay until the end.
    streams = 3 * max(component_bytes.values()) <= free_host_bytes
    return OffloadSpec(mode="group", offload_type="leaf_level", use_stream=streams or None)
