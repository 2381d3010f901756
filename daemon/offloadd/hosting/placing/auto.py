"""What `auto` means: everything on the device where it fits, else streamed within what is free."""

from __future__ import annotations

from collections.abc import Mapping

from offloadd.channel.specs import OffloadSpec

ACTIVATIONS_SHARE = 0.25
"""Part of the free device memory that is left to activations; a picture of 1024 pixels square takes
2 to 5 GB in the common models, whose weights are 5 to 25 GB."""


def choose_offload(
    component_bytes: Mapping[str, int],
    free_device_bytes: int,
    budget_bytes: int | None,
    on_cpu: bool,
) -> OffloadSpec:
    """The mode for a pipeline whose components take `component_bytes` each.

    `none` if all components fit together into the model's budget and into what is free; on a CPU
    the weights are computed on where they lie, so that only a budget counts. Else `stream`.
    """
    total_bytes = sum(component_bytes.values())
    fits_budget = budget_bytes is None or total_bytes <= budget_bytes
    fits_device = on_cpu or total_bytes <= free_device_bytes * (1 - ACTIVATIONS_SHARE)
    return OffloadSpec(mode="none" if fits_budget and fits_device else "stream")
