"""What an engine says about the memory that its components take now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offloadd.offload.planning.planning import GUESSED_BANDWIDTH_BYTES_PER_S, Planning


@dataclass(frozen=True, slots=True)
class ComponentStats:
    """One attached module: all its weights, what is on the device to stay, what a step streams.

    `adapter_bytes` is device memory beside the weights, `derived_bytes` host memory that fusing
    took.
    """

    name: str
    size_bytes: int
    resident_bytes: int
    streamed_bytes: int
    in_place: bool
    stage: str
    adapter_bytes: int
    derived_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`resident_bytes` and `ring_bytes` are what weights take of the device now.

    `staging_bytes` is page-locked host memory that weights on their way from disk pass through.
    """

    budget_bytes: int
    reserve_bytes: int
    resident_bytes: int
    ring_bytes: int
    staging_bytes: int
    components: tuple[ComponentStats, ...]


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """What plans were made from: the link (0: not measured), and a step's compute by component."""

    link_bytes_per_s: float
    compute_s: Mapping[str, float]


def measured_speed(plannings: Mapping[str, Planning]) -> MeasuredSpeed:
    """The figures of all components that have been measured; the link's are the last one's."""
    given = {
        name: planning.plan.given
        for name, planning in plannings.items()
        if planning.plan is not None and planning.plan.given.order
    }
    streamed = [
        one.bandwidth_bytes_per_s
        for one in given.values()
        if one.bandwidth_bytes_per_s != GUESSED_BANDWIDTH_BYTES_PER_S
    ]
    return MeasuredSpeed(
        streamed[-1] if streamed else 0.0, {name: sum(one.compute_s) for name, one in given.items()}
    )


def component_stats(planning: Planning) -> ComponentStats:
    """What one component takes now."""
    component, plan = planning.component, planning.plan
    return ComponentStats(
        name=component.name,
        size_bytes=component.size_bytes,
        resident_bytes=component.resident_bytes,
        streamed_bytes=plan.streamed_bytes_per_step if plan else 0,
        in_place=component.in_place,
        stage=planning.stage.name.lower(),
        adapter_bytes=component.adapters.size_bytes,
        derived_bytes=component.derived.derived_bytes if component.derived else 0,
    )
