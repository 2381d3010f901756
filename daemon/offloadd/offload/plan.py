"""Which groups stay on the device and how large the ring is: a pure function of what was measured.

Promises: a plan never needs more than its budget; a budget that cannot work is refused with the
smallest one that does; the prediction is that of the event simulation in `schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Everything a plan depends on.

    `order` holds a group index for each position of a step and `compute_s` the seconds that
    position computes. `reserve_bytes` is the measured peak of activations.
    """

    sizes_bytes: tuple[int, ...]
    order: tuple[int, ...]
    compute_s: tuple[float, ...]
    bandwidth_bytes_per_s: float
    latency_s: float
    budget_bytes: int
    leftover_bytes: int = 0
    reserve_bytes: int = 0
    alignment_bytes: int = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """The resident groups, the ring's capacity, and what that is predicted to cost.

    `predicted_device_bytes` is leftovers, residents, ring and reserve together;
    `streamed_bytes_per_step` counts a group once for each time it comes up in the order.
    """

    given: PlanInput
    resident: frozenset[int]
    ring_bytes: int
    resident_bytes: int
    predicted_device_bytes: int
    predicted_step_s: float
    streamed_bytes_per_step: int

    @property
    def ring_slots(self) -> int:
        """How many of the largest streamed group the ring holds at once; 0 without a ring."""
        raise NotImplementedError

    def explain(self) -> str:
        """The plan in a few lines, as every out-of-memory error shows it."""
        raise NotImplementedError


def make_plan(given: PlanInput) -> Plan:
    """The fastest plan found within the budget.

    Raises OutOfMemory, with the smallest budget that works in its message and in
    `details["minimum_budget_bytes"]`, when leftovers, reserve and a ring for the largest group
    do not fit.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Measured:
    """What steps under a plan really took: compute per position, link, step time, reserve."""

    compute_s: tuple[float, ...]
    bandwidth_bytes_per_s: float
    latency_s: float
    step_s: float
    reserve_bytes: int


def correct_plan(plan: Plan, measured: Measured) -> Plan:
    """Plan again from measured figures; the same plan object if nothing would be gained."""
    raise NotImplementedError


def keep_better(old: Plan, new: Plan, measured_old_s: float, measured_new_s: float) -> Plan:
    """The plan to go on with after both ran: the old one if the new one measured slower."""
    raise NotImplementedError
