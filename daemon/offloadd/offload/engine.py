"""The offload engine: hosts modules on one device within a budget, streaming what does not fit.

Promises: attached modules compute the same numbers as if they were resident; weights on the device
never exceed the budget; any exception leaves the engine ready for the next call. The plan of each
component is made from its own first pass and corrected afterwards. One thread at a time uses an
engine (the one that has the turn); attaching and detaching count as using.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from offload_protocol.errors import InvalidRequest
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.adapters.changes import AdapterChanges
from offloadd.offload.component import attach_component
from offloadd.offload.engine_stats import (
    EngineStats,
    MeasuredSpeed,
    component_stats,
    measured_speed,
)
from offloadd.offload.grouping.grouping import Grouping
from offloadd.offload.grouping.groups import GroupOptions, group_module
from offloadd.offload.planning.allowances import Allowance
from offloadd.offload.planning.device_budget import DeviceBudget
from offloadd.offload.planning.plan import Plan, make_plan
from offloadd.offload.planning.planning import Planning, Stage, Terms, first_input
from offloadd.offload.streaming.counters import Counters
from offloadd.offload.streaming.executor import Executor
from offloadd.offload.streaming.staging import Staging
from offloadd.offload.sweep.state import GlobalRandomness, thread_state
from offloadd.offload.sweep.sweep import MOST_MEMBERS, SweepRoom, Switch
from offloadd.offload.weights.casting import Casting, StoredAs
from offloadd.store.source import WeightSource


class Engine:
    """`budget_bytes` is for weights, ring and activations together.

    `reserve_bytes` of it stay free for activations, until more than that has been measured.
    `on_border` is called at every entry of an attached module's forward; what it raises (a cancel)
    ends that call cleanly.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        budget_bytes: int,
        *,
        reserve_bytes: int = 0,
        on_border: Callable[[str], None] = lambda component: None,
    ) -> None:
        self.on_border = on_border
        self._accelerator = accelerator
        self._budget = DeviceBudget(accelerator, budget_bytes, reserve_bytes)
        itself = weakref.ref(self)

        def border(name: str) -> None:
            engine = itself()
            if engine is not None:
                engine._at_border(name)

        def step_end(name: str) -> None:
            engine = itself()
            if engine is not None:
                engine._plannings[name].advance(engine._terms(name))

        def explain() -> str:
            engine = itself()
            return engine.explain() if engine is not None else ""

        self._executor = Executor(
            accelerator, self._budget.tier, on_border=border, on_step_end=step_end
        )
        self._budget.tier.explain = explain
        self._staging = Staging(accelerator)
        self._plannings: dict[str, Planning] = {}
        self._farewells: dict[str, weakref.finalize[..., nn.Module]] = {}

        def terms(name: str) -> Terms:
            engine = itself()
            assert engine is not None  # it holds whoever asks
            return engine._terms(name)

        self._adapters = AdapterChanges(
            accelerator, self._budget.tier, self._executor, self._plannings, terms
        )

    @property
    def budget_bytes(self) -> int:
        """What weights, ring and activations may take together."""
        return self._budget.budget_bytes

    @property
    def counters(self) -> Counters:
        """What has been moved and waited for so far."""
        return self._executor.counters

    def attach(
        self,
        name: str,
        module: nn.Module,
        source: WeightSource,
        options: GroupOptions | None = None,
        casting: Casting | StoredAs | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        """Host a module whose weights (real or on meta) are those that the source gives.

        With a casting, the source gives them as `module_layout(module, casting)` says. An allowance
        bounds what it may have on the device. The module may be dropped at any time; that detaches
        it. Raises InvalidRequest for a name in use or
        options that fit no module, ModelLoadFailed for weights that cannot be streamed, OutOfMemory
        with the smallest budget that works.
        """
        if name in self._plannings:
            raise InvalidRequest(
                f"a component named {name!r} is hosted already", hint="unload it first"
            )
        grouping = group_module(module, options or GroupOptions(), casting)
        if allowance is not None:
            self._budget.allowances[name] = allowance
        try:
            self._attach(name, module, grouping, source, casting)
        except BaseException:
            self.detach(name)
            raise
        self._farewells[name] = weakref.finalize(module, _module_gone, weakref.ref(self), name)

    def _attach(
        self,
        name: str,
        module: nn.Module,
        grouping: Grouping,
        source: WeightSource,
        casting: Casting | StoredAs | None,
    ) -> None:
        if self._accelerator.has_dma or source.host_view() is None:
            # Before the module gives its weights away: whether it can run at all.
            terms, alignment_bytes = self._terms(name), self._accelerator.alignment_bytes
            make_plan(first_input(grouping, terms, alignment_bytes))
            self._executor.make_room(grouping.kept_bytes, name)
        self._executor.allow(name, self._budget.allowances.get(name))
        component = attach_component(
            name,
            module,
            grouping,
            source,
            self._accelerator,
            self._budget.tier,
            self._executor,
            casting,
            self._staging,
        )
        planning = Planning(component, self._executor, self._accelerator)
        self._plannings[name] = planning
        if not component.in_place:
            planning.start(self._terms(name))
        for other in self._streaming():
            if other is not planning:
                other.keep_within(self._terms(other.component.name))

    @contextmanager
    def changing_adapters(self, *names: str) -> Iterator[None]:
        """Load, switch or delete adapters of these components inside this block.

        With peft, diffusers and transformers as usual, but not their fusing (see `fuse`). What the
        adapters add is moved to the device and counted when the block ends; no base weight is read
        or moved for it. If the block raises, or there is no room, the modules are as before.

        Raises InvalidRequest for an adapter that does not fit the model, ModelLoadFailed naming a
        tensor that cannot be used, OutOfMemory with the plan.
        """
        with self._adapters.changing(*names):
            yield

    def fuse(
        self,
        name: str,
        adapter_names: Sequence[str] | None = None,
        scale: float = 1.0,
        *,
        safe: bool = False,
    ) -> None:
        """Compute with weights that adapters (None: the active ones) are merged into.

        The derived weights are host memory of their own, counted as `derived_bytes`. Raises as
        `fuse_adapters`; then nothing has changed.
        """
        self._adapters.fuse(name, adapter_names, scale, safe=safe)

    def unfuse(self, name: str) -> None:
        """Compute with the base and its adapters again; the derived weights are given back."""
        self._adapters.unfuse(name)

    def sweep(self, *names: str, make_switch: Callable[[], Switch] | None = None) -> SweepRoom:
        """Where several threads compute with these components, sharing what each step brings.

        `make_switch` keeps apart what threads of one process share (default: torch's global random
        generators). See `sweep`.
        """
        device = self._accelerator.device
        return SweepRoom(
            self._executor.gate,
            names,
            limit=lambda name: MOST_MEMBERS if self.is_planned(name) else 1,
            make_switch=make_switch or (lambda: GlobalRandomness(device)),
            thread_state=thread_state(device),
        )

    def is_planned(self, name: str) -> bool:
        """Whether a component has a plan that was made from what its first pass measured."""
        planning = self._plannings[name]
        return planning.component.in_place or planning.stage is not Stage.FIRST_PASS

    def is_in_place(self, name: str) -> bool:
        """Whether a component computes on the host's own bytes, so that nothing is streamed."""
        return self._plannings[name].component.in_place

    def is_transfer_limited(self, name: str) -> bool:
        """Whether a step of a component, as planned, waits for bytes rather than for compute."""
        plan = self._plannings[name].plan
        if plan is None or not self.is_planned(name):
            return False
        work = plan.work()
        return sum(work.copy_s) > sum(work.compute_s)

    def detach(self, name: str) -> None:
        """Let a module go: its weights are meta parameters afterwards, its memory is given back."""
        farewell = self._farewells.pop(name, None)
        if farewell is not None:
            farewell.detach()
        planning = self._plannings.pop(name, None)
        if planning is not None:
            planning.component.detach()
        self._budget.allowances.pop(name, None)
        self._executor.allow(name, None)
        self._adapters.forget(name)

    def close(self) -> None:
        """Detach everything."""
        for name in list(self._plannings):
            self.detach(name)
        self._staging.close()

    def plan(self, name: str) -> Plan | None:
        """The plan that a component follows now; None if it needs none."""
        return self._plannings[name].plan

    def replan(self, *, budget_bytes: int | None = None, reserve_bytes: int | None = None) -> None:
        """Plan everything anew from its next step on, for another budget or reserve if given.

        Raises OutOfMemory, changing nothing, if a component cannot run within the budget.
        """
        before, reserve_before = self.budget_bytes, self._budget.reserve_bytes
        if reserve_bytes is not None:
            self._budget.reserve_bytes = reserve_bytes
        self._budget.set(before if budget_bytes is None else budget_bytes)
        try:
            for planning in self._streaming():
                planning.start(self._terms(planning.component.name))
        except BaseException:
            self._budget.reserve_bytes = reserve_before
            self._budget.set(before)
            for planning in self._streaming():
                planning.start(self._terms(planning.component.name))
            raise

    def skip(self, name: str) -> None:
        """Say that a component's step, which may be expected next, does not come: a hint alone."""
        self._executor.prediction.skip(name)

    def empty(self) -> None:
        """Let everything go that is on the device and can come back; nothing may be computing."""
        self._executor.drop_all()

    def settle(self) -> None:
        """Let every component's plan advance that has measured enough; call between jobs.

        Components that are used through other methods than their forward (decoders) have no border
        of their own and get their plan here, or at a border of another component.
        """
        for name, planning in self._plannings.items():
            planning.advance(self._terms(name))

    def explain(self) -> str:
        """All plans in words."""
        return "\n".join(
            f"{name}: {planning.plan.explain()}"
            for name, planning in self._plannings.items()
            if planning.plan is not None
        )

    def measured_speed(self) -> MeasuredSpeed:
        """What the present plans were made from."""
        return measured_speed(self._plannings)

    def stats(self) -> EngineStats:
        """What is where now."""
        tier = self._budget.tier
        return EngineStats(
            budget_bytes=self.budget_bytes,
            reserve_bytes=self._budget.reserve_bytes,
            resident_bytes=tier.used_bytes - tier.ring_bytes,
            ring_bytes=tier.ring_bytes,
            staging_bytes=self._staging.size_bytes,
            components=tuple(map(component_stats, self._plannings.values())),
        )

    def _at_border(self, name: str) -> None:
        gate = self._executor.gate
        if not gate.has_begun:
            for other, planning in self._plannings.items():
                if other != name:
                    planning.advance(self._terms(other))
            self._plannings[name].share(gate.sharers)
        self.on_border(name)

    def _terms(self, name: str) -> Terms:
        return self._budget.terms(name, self._plannings)

    def _streaming(self) -> list[Planning]:
        return [p for p in self._plannings.values() if not p.component.in_place]


def _module_gone(engine_ref: weakref.ref[Engine], name: str) -> None:
    engine = engine_ref()
    if engine is not None:
        engine.detach(name)
