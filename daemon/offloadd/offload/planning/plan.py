"""Which groups stay on the device and how large the ring is: a pure function of what was measured.

Promises: a plan never needs more than its budget; a budget that cannot work is refused with the
smallest one that does; the prediction is that of the event simulation in `schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_protocol.errors import OutOfMemory
from offload_protocol.sizes import format_duration, format_size
from offloadd.offload.planning.residency import search
from offloadd.offload.planning.residency_question import Question
from offloadd.offload.planning.schedule import (
    StepWork,
    Timeline,
    exact_step_s,
    quick_step_s,
    simulate,
)
from offloadd.store.layout import align

ENOUGH_SLOTS = (2, 3, 4, 6, 8, 12, 16)
"""Ring depths, in largest streamed groups, of which the smallest that is as good is taken."""

JUDGED_EXACTLY = 4
"""So many of the quick search's best answers are simulated through the engine's own ring."""

AS_GOOD = 1.001
"""Of plans whose step times are this close, the one that streams least is taken."""

WORTH_CHANGING = 0.98
"""A corrected plan replaces one that it is predicted to beat by this factor."""

NOT_SLOWER = 1.02
"""A new plan stays if it measured at most this factor of the old one; noise is not a reason."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Everything a plan depends on.

    `order` holds a group index for each position of a step and `compute_s` the seconds that
    position computes; an empty order stands for each group once, computing for no time.
    `reserve_bytes` is the measured peak of activations, `latency_s` what each copy takes besides
    its bytes.
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

    def __post_init__(self) -> None:
        if len(self.order) != len(self.compute_s):
            raise ValueError(f"{len(self.order)} positions, {len(self.compute_s)} compute times")
        if self.bandwidth_bytes_per_s <= 0:
            raise ValueError(f"a link of {self.bandwidth_bytes_per_s} bytes per second")

    @property
    def minimum_budget_bytes(self) -> int:
        """The smallest budget that works: leftovers, reserve, and the largest group's ring."""
        largest = max(self.aligned_sizes_bytes, default=0)
        return self.leftover_bytes + self.reserve_bytes + largest

    @property
    def aligned_sizes_bytes(self) -> tuple[int, ...]:
        return tuple(align(size, self.alignment_bytes) for size in self.sizes_bytes)

    @property
    def room_bytes(self) -> int:
        """What residents and ring may take together."""
        return self.budget_bytes - self.leftover_bytes - self.reserve_bytes

    def question(self) -> Question:
        """What the search is asked."""
        sizes = self.aligned_sizes_bytes
        return Question(
            sizes_bytes=sizes,
            copy_s=tuple(self.latency_s + size / self.bandwidth_bytes_per_s for size in sizes),
            order=self.order or tuple(range(len(sizes))),
            compute_s=self.compute_s or (0.0,) * len(sizes),
            room_bytes=self.room_bytes // self.alignment_bytes * self.alignment_bytes,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The resident groups, the ring's capacity, and what that is predicted to cost.

    `predicted_device_bytes` is leftovers, residents, ring and reserve together;
    `streamed_bytes_per_step` counts a group once for each time it comes up in the order.
    """

    given: PlanInput
    resident: frozenset[int]
    ring_bytes: int
    predicted_step_s: float

    @property
    def resident_bytes(self) -> int:
        return self.given.question().resident_bytes(self.resident)

    @property
    def predicted_device_bytes(self) -> int:
        given = self.given
        return given.leftover_bytes + given.reserve_bytes + self.resident_bytes + self.ring_bytes

    @property
    def streamed_bytes_per_step(self) -> int:
        return self.work().total_bytes

    @property
    def ring_slots(self) -> int:
        """How many of the largest streamed group the ring holds at once; 0 without a ring."""
        smallest = self.given.question().smallest_ring_bytes(self.resident)
        return self.ring_bytes // smallest if smallest else 0

    def work(self) -> StepWork:
        """One step under this plan, for the simulation."""
        return self.given.question().work(self.resident)

    def timeline(self) -> Timeline:
        """What the simulation expects both queues to do."""
        return simulate(self.work(), self.ring_bytes)

    def explain(self) -> str:
        """The plan in a few lines, as every out-of-memory error shows it."""
        given, work = self.given, self.work()
        groups = len(given.sizes_bytes)
        compute_s, copy_s = sum(work.compute_s), sum(work.copy_s)
        limit = "transfers" if copy_s > compute_s else "compute"
        lines = [
            f"budget {format_size(given.budget_bytes)}, planned "
            f"{format_size(self.predicted_device_bytes)}: "
            f"{format_size(self.resident_bytes)} for {len(self.resident)} of {groups} groups that "
            f"stay, {format_size(self.ring_bytes)} for a ring of {self.ring_slots} slots, "
            f"{format_size(given.leftover_bytes)} for small layers and buffers, "
            f"{format_size(given.reserve_bytes)} kept free for activations",
            f"each step streams {format_size(work.total_bytes)} at "
            f"{format_size(given.bandwidth_bytes_per_s)}/s in {format_duration(copy_s)} while it "
            f"computes for {format_duration(compute_s)}; predicted "
            f"{format_duration(self.predicted_step_s)} a step, limited by {limit}",
            f"the smallest budget that works is {format_size(given.minimum_budget_bytes)}",
        ]
        return "\n".join(lines)


def make_plan(given: PlanInput) -> Plan:
    """The fastest plan found within the budget.

    Raises OutOfMemory, with the smallest budget that works in its message and in
    `details["minimum_budget_bytes"]`, when leftovers, reserve and a ring for the largest group do
    not fit.
    """
    question = given.question()
    everything = frozenset(range(len(given.sizes_bytes)))
    if question.resident_bytes(everything) <= question.room_bytes:
        return Plan(given, everything, 0, sum(given.compute_s))
    if question.room_bytes < question.smallest_ring_bytes(frozenset()):
        raise _refusal(given)
    judged = [
        Plan(given, answer.resident, answer.ring_bytes, step_s)
        for answer in search(question)[:JUDGED_EXACTLY]
        for step_s in [exact_step_s(question.work(answer.resident), answer.ring_bytes)]
    ]
    best_s = min(plan.predicted_step_s for plan in judged)
    good = [plan for plan in judged if plan.predicted_step_s <= best_s * AS_GOOD]
    chosen = min(good, key=lambda plan: (plan.streamed_bytes_per_step, plan.predicted_step_s))
    return _with_enough_ring(chosen, best_s * AS_GOOD)


@dataclass(frozen=True, slots=True)
class Measured:
    """What steps under a plan really took: compute by position of `order`, link, reserve."""

    order: tuple[int, ...]
    compute_s: tuple[float, ...]
    bandwidth_bytes_per_s: float
    latency_s: float
    reserve_bytes: int


def correct_plan(plan: Plan, measured: Measured) -> Plan:
    """Plan again from measured figures.

    A plan that still fits and that nothing beats by more than 2% keeps its residents and ring, with
    the prediction that the figures give. Raises OutOfMemory if the measured reserve leaves no room.
    """
    given = replace(
        plan.given,
        order=measured.order,
        compute_s=measured.compute_s,
        bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s,
        latency_s=measured.latency_s,
        reserve_bytes=measured.reserve_bytes,
    )
    better = make_plan(given)
    kept = Plan(given, plan.resident, plan.ring_bytes, 0.0)
    if kept.predicted_device_bytes > given.budget_bytes:
        return better
    kept = replace(kept, predicted_step_s=exact_step_s(kept.work(), kept.ring_bytes))
    return better if better.predicted_step_s < kept.predicted_step_s * WORTH_CHANGING else kept


def keep_better(old: Plan, new: Plan, measured_old_s: float, measured_new_s: float) -> Plan:
    """The plan to go on with after both ran: the old one if the new one measured slower.

    The old one is not taken back if it leaves less free than the reserve that is known now.
    """
    returned = replace(old, given=replace(old.given, reserve_bytes=new.given.reserve_bytes))
    if returned.predicted_device_bytes > new.given.budget_bytes:
        return new
    return new if measured_new_s <= measured_old_s * NOT_SLOWER else returned


def _with_enough_ring(plan: Plan, good_s: float) -> Plan:
    """Give back what the ring does not need, but keep one more slot than that for uneven times."""
    slot = plan.given.question().smallest_ring_bytes(plan.resident)
    work = plan.work()
    for slots in ENOUGH_SLOTS:
        ring_bytes = (slots + 1) * slot
        if ring_bytes >= plan.ring_bytes:
            break
        if quick_step_s(work, slots * slot) <= good_s:
            step_s = exact_step_s(work, ring_bytes)
            if step_s <= good_s:
                return replace(plan, ring_bytes=ring_bytes, predicted_step_s=step_s)
    return plan


def _refusal(given: PlanInput) -> OutOfMemory:
    minimum = given.minimum_budget_bytes
    largest = max(given.aligned_sizes_bytes, default=0)
    return OutOfMemory(
        f"A device budget of {format_size(given.budget_bytes)} ({given.budget_bytes} bytes) is too "
        f"small; the smallest that works is {format_size(minimum)} ({minimum} bytes): "
        f"{format_size(given.leftover_bytes)} for small layers and buffers, "
        f"{format_size(given.reserve_bytes)} for activations, "
        f"{format_size(largest)} for the largest group.",
        hint=f"Set the device budget to at least {minimum} bytes, or use smaller groups "
        '(fewer num_blocks_per_group, or offload_type = "leaf_level").',
        details={
            "minimum_budget_bytes": minimum,
            "budget_bytes": given.budget_bytes,
            "leftover_bytes": given.leftover_bytes,
            "reserve_bytes": given.reserve_bytes,
            "largest_group_bytes": largest,
        },
    )
