"""From the first pass to a settled plan: when a component is measured, planned, and corrected.

Stages: the first pass runs with a small ring and fetches what it needs when it needs it; what it
measured makes the plan. The plan is measured when it runs warm, and made again from that; if the
new one turns out slower, the old one comes back. Then nothing is measured any more. Steps that
several jobs share follow a plan of their own, which nothing is measured under (`sharing`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from offload_protocol.errors import OutOfMemory
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.component import Component
from offloadd.offload.grouping.grouping import Grouping
from offloadd.offload.planning.plan import (
    Measured,
    Plan,
    PlanInput,
    correct_plan,
    keep_better,
    make_plan,
)
from offloadd.offload.planning.sharing import SharedPlans
from offloadd.offload.planning.trace import StepFigures, StepTrace, fit_link
from offloadd.offload.streaming.executor import Executor
from offloadd.offload.streaming.reads import regroup
from offloadd.store.layout import align

_log = logging.getLogger(__name__)

FIRST_RING_GROUPS = 2
WARM_STEPS = 2
"""Steps under a new plan before it is measured: residents come, then the ring finds its order."""

MEASURED_STEPS = 2
GUESSED_BANDWIDTH_BYTES_PER_S = 8e9
"""Until the first pass has measured the link; only the order of magnitude matters."""


class Stage(Enum):
    """How far the planning of a component has come."""

    FIRST_PASS = auto()
    PLANNED = auto()
    CORRECTED = auto()
    SETTLED = auto()


@dataclass(frozen=True, slots=True)
class Terms:
    """What the plan of one component may use of the device, and what of that must stay free."""

    budget_bytes: int
    reserve_bytes: int


@dataclass(slots=True)
class Planning:
    """The plan of one component and how it came about."""

    component: Component
    executor: Executor
    accelerator: Accelerator
    plan: Plan | None = None
    stage: Stage = Stage.FIRST_PASS
    _trace: StepTrace = field(init=False)
    _before: tuple[Plan, float] | None = None
    _shared: SharedPlans = field(default_factory=SharedPlans)

    def start(self, terms: Terms) -> None:
        """Begin with the first pass; raises OutOfMemory if the budget can never work."""
        self.stage = Stage.FIRST_PASS
        self._before = None
        self.accelerator.restart_peak()
        self.plan = make_plan(self._input(terms))
        self._take_first_ring(self.plan)

    def refit(self, terms: Terms, more_bytes: int = 0) -> None:
        """Plan again from what is known, as other bytes stay on the device than before.

        `more_bytes` are about to come. Raises OutOfMemory, changing nothing, if they leave too
        little room.
        """
        if self.component.in_place or self.plan is None:
            return
        leftover_bytes = self.component.leftover_bytes + more_bytes
        plan = make_plan(
            replace(
                self.plan.given,
                budget_bytes=terms.budget_bytes,
                reserve_bytes=terms.reserve_bytes,
                leftover_bytes=leftover_bytes,
            )
        )
        self._before = None
        if self.stage is Stage.FIRST_PASS:
            self.plan = plan
            self._take_first_ring(plan)
        else:
            self._follow(plan, Stage.SETTLED if self.stage is Stage.SETTLED else Stage.PLANNED)

    def keep_within(self, terms: Terms) -> None:
        """Plan again if the plan takes more than there is by now; slow, but right, if none fits."""
        if self.plan is None or self.plan.predicted_device_bytes <= terms.budget_bytes:
            return
        try:
            self.refit(terms)
        except OutOfMemory as error:
            _log.warning("%s keeps to what it has: %s", self.component.name, error.message)

    def _take_first_ring(self, plan: Plan) -> None:
        self._shared.follow_alone()
        sizes = self.component.grouping.sizes_bytes()
        largest = align(max(sizes, default=0), self.accelerator.alignment_bytes)
        ring_bytes = min(FIRST_RING_GROUPS * largest, plan.given.room_bytes)
        self.executor.configure(self.component.name, frozenset(), ring_bytes)
        self._measure()

    def share(self, sharers: int) -> None:
        """A step of the component is about to begin, and so many jobs share it."""
        if self.plan is None or self.stage is Stage.FIRST_PASS or self.component.in_place:
            return
        try:
            plan = self._shared.next_step(self.plan, sharers)
        except OutOfMemory:
            return  # the plan for one is slower for several, and right
        if plan is None:
            return
        self.executor.configure(self.component.name, plan.resident, plan.ring_bytes)
        if plan is self.plan and self.stage is not Stage.SETTLED:
            self._measure()

    def advance(self, terms: Terms) -> None:
        """Go on to the next stage if enough was measured; no group of the component is in use."""
        if self.stage is Stage.SETTLED or self.component.in_place or not self.component.groups:
            return
        try:
            if self.stage is Stage.FIRST_PASS:
                if self._trace.whole_steps:
                    self._end_first_pass(terms)
            elif self._trace.whole_steps >= WARM_STEPS + MEASURED_STEPS:
                self._judge(terms)
        except OutOfMemory as error:
            # Whatever is configured by now is slower but right, and nobody asked for a change.
            _log.warning("%s keeps to what it has: %s", self.component.name, error.message)
            self.stage = Stage.SETTLED
            self.executor.trace(self.component.name, None)

    def _end_first_pass(self, terms: Terms) -> None:
        grouping = regroup(self.component.grouping, self.component.reads.reads)
        if grouping != self.component.grouping:
            self.component.regroup(grouping)
            self.start(terms)
            return
        figures = self._trace.figures()[-1]
        bandwidth, latency_s = self._link()
        given = self._input(terms, figures, bandwidth, latency_s)
        self._follow(make_plan(given), Stage.PLANNED)

    def _judge(self, terms: Terms) -> None:
        """Correct the plan by what it measured, or settle between the old one and the new."""
        assert self.plan is not None
        figures = min(self._trace.figures()[WARM_STEPS:], key=lambda step: step.step_s)
        if self._before is not None:
            old, old_s = self._before
            self._follow(keep_better(old, self.plan, old_s, figures.step_s), Stage.SETTLED)
            return
        bandwidth, latency_s = self._link()
        corrected = correct_plan(
            self.plan,
            Measured(
                order=figures.order,
                compute_s=figures.compute_s,
                bandwidth_bytes_per_s=bandwidth,
                latency_s=latency_s,
                reserve_bytes=terms.reserve_bytes,
            ),
        )
        same = (corrected.resident, corrected.ring_bytes) == (
            self.plan.resident,
            self.plan.ring_bytes,
        )
        self._before = (self.plan, figures.step_s)
        self._follow(corrected, Stage.SETTLED if same else Stage.CORRECTED)

    def _follow(self, plan: Plan, stage: Stage) -> None:
        self.plan, self.stage = plan, stage
        self._shared.follow_alone()
        self.executor.configure(self.component.name, plan.resident, plan.ring_bytes)
        if stage is Stage.SETTLED:
            self.executor.trace(self.component.name, None)
        else:
            self._measure()

    def _measure(self) -> None:
        self._trace = StepTrace(self.accelerator)
        self.executor.trace(self.component.name, self._trace)

    def _link(self) -> tuple[float, float]:
        copies = self._trace.copies()
        if copies:
            return fit_link(copies)
        assert self.plan is not None
        return self.plan.given.bandwidth_bytes_per_s, self.plan.given.latency_s

    def _input(
        self,
        terms: Terms,
        figures: StepFigures | None = None,
        bandwidth_bytes_per_s: float = GUESSED_BANDWIDTH_BYTES_PER_S,
        latency_s: float = 0.0,
    ) -> PlanInput:
        given = first_input(self.component.grouping, terms, self.accelerator.alignment_bytes)
        return replace(
            given,
            order=figures.order if figures else (),
            compute_s=figures.compute_s if figures else (),
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            latency_s=latency_s,
            leftover_bytes=self.component.leftover_bytes,
        )


def first_input(grouping: Grouping, terms: Terms, alignment_bytes: int) -> PlanInput:
    """What can be planned with before anything ran: sizes and budget."""
    return PlanInput(
        sizes_bytes=grouping.sizes_bytes(),
        order=(),
        compute_s=(),
        bandwidth_bytes_per_s=GUESSED_BANDWIDTH_BYTES_PER_S,
        latency_s=0.0,
        budget_bytes=terms.budget_bytes,
        leftover_bytes=grouping.kept_bytes,
        reserve_bytes=terms.reserve_bytes,
        alignment_bytes=alignment_bytes,
    )
