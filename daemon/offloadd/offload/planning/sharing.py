"""The plan for steps that several jobs share: what is brought once computes for all of them.

A lone job that computes little for what it brings is best served by as many residents as fit and a
ring of one group. Eight jobs that share each group compute for so long with it that the next one
has to come meanwhile, which takes a second place in the ring: each number of sharers has a plan of
its own, made from the same measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offloadd.offload.planning.plan import Measured, Plan, correct_plan

PATIENCE_STEPS = 2
"""Steps in a row with fewer sharers before the plan for fewer is followed: a change of the ring
loses what was fetched ahead, and a sweep often misses somebody for a step."""


@dataclass(slots=True)
class SharedPlans:
    """The plans of one component by how many share a step; `sharers` is what is followed now.

    Sharers are counted in powers of two, so that few plans are made.
    """

    sharers: int = 1
    _made_from: Plan | None = None
    _plans: dict[int, Plan] = field(default_factory=dict)
    _steps_with_fewer: int = 0

    def next_step(self, plan: Plan, sharers: int) -> Plan | None:
        """The plan to follow from now on, if that is another than the one followed now.

        `plan` is that of one job alone; a step begins that so many share. Raises OutOfMemory as
        `correct_plan` does, changing nothing.
        """
        wanted = 1 << (max(sharers, 1).bit_length() - 1)
        if wanted < self.sharers:
            self._steps_with_fewer += 1
            if self._steps_with_fewer < PATIENCE_STEPS:
                return None
        self._steps_with_fewer = 0
        if wanted == self.sharers:
            return None
        chosen = self._plan_for(plan, wanted)
        self.sharers = wanted
        return chosen

    def follow_alone(self) -> None:
        """The component follows the plan of one job alone from now on."""
        self.sharers, self._steps_with_fewer = 1, 0

    def _plan_for(self, plan: Plan, sharers: int) -> Plan:
        if plan is not self._made_from:
            self._made_from, self._plans = plan, {1: plan}
        if sharers not in self._plans:
            self._plans[sharers] = shared_plan(plan, sharers)
        return self._plans[sharers]


def shared_plan(plan: Plan, sharers: int) -> Plan:
    """The plan for steps that so many share; residents and ring change only if that pays."""
    given = plan.given
    computed = Measured(
        order=given.order,
        compute_s=tuple(sharers * seconds for seconds in given.compute_s),
        bandwidth_bytes_per_s=given.bandwidth_bytes_per_s,
        latency_s=given.latency_s,
        reserve_bytes=given.reserve_bytes,
    )
    return correct_plan(plan, computed)
