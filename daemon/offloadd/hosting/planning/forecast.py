"""What hosting a model would take and cost, from the headers of its files; nothing is loaded.

Promises: modes, groupings, allowances and plans are made by the functions that loading uses, so
that the forecast is what loading then does, as long as the same budgets hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from offload_protocol.errors import OutOfMemory
from offload_protocol.records import BudgetStep, ComponentForecast, Forecast
from offloadd.channel.forecasts import ForecastOrder
from offloadd.hosting.device_host import reserve_bytes
from offloadd.hosting.loading.parts import skeleton_of
from offloadd.hosting.placing.features import switch_on_features
from offloadd.hosting.placing.offload_plan import Plan as Settings
from offloadd.hosting.placing.offload_plan import setting_notes
from offloadd.hosting.placing.offloading import allowances_of
from offloadd.hosting.placing.presets import casting_of, group_options, resting_on_disk
from offloadd.hosting.sources.describe import Description, describe
from offloadd.hosting.sources.dtypes import dtype_name
from offloadd.offload.accelerator.cpu import CpuAccelerator
from offloadd.offload.accelerator.torch_device import TorchAccelerator
from offloadd.offload.grouping.groups import Grouping, group_module
from offloadd.offload.planning.allowances import Allowance
from offloadd.offload.planning.plan import Plan, PlanInput, make_plan
from offloadd.store.index import ComponentFiles

GUESSED_DMA_BYTES_PER_S = 12e9
GUESSED_DISK_BYTES_PER_S = 1e9
"""Until the worker has measured its link: half of PCI express 4, and a disk of a server."""

BUDGETS_TRIED = 12
AS_FAST = 1.02
"""The best budget is the smallest that is as fast as the largest, within this factor."""


def forecast(order: ForecastOrder) -> Forecast:
    """Plan a model for a device.

    Raises what `describe` and the checks of loading raise.
    """
    description = describe(order.spec, order.on_cpu)
    budget_bytes = description.budget_bytes(order.device_bytes)
    settings = description.plan(order.free_bytes, order.device_bytes, order.on_cpu)
    parts = [one for one in description.files.components if one.checkpoint is not None]
    groupings = _groupings(parts, description, settings)
    on_disk = resting_on_disk(settings, description.component_bytes, budget_bytes, order.on_cpu)
    held = _held_bytes(groupings, on_disk, order.host_budget_bytes)
    short = {name for name in groupings if not held[name] and budget_bytes is None}
    link = order.link_bytes_per_s or (
        GUESSED_DISK_BYTES_PER_S if order.on_cpu else GUESSED_DMA_BYTES_PER_S
    )
    forecaster = _Forecaster(order, settings, groupings, link)
    outlook = forecaster.outlook(budget_bytes, short if order.on_cpu else set())
    budgets = forecaster.budgets()
    return Forecast(
        source=order.spec.source,
        pipeline=description.files.class_name,
        dtype=dtype_name(description.dtype),
        offload="/".join(sorted({one.mode for one in settings.values()})),
        device_budget_bytes=budget_bytes,
        host_budget_bytes=order.host_budget_bytes,
        minimum_budget_bytes=forecaster.minimum_bytes,
        device_bytes=outlook.device_bytes,
        host_bytes=sum(held.values()),
        link_bytes_per_s=link,
        link_is_measured=order.link_bytes_per_s > 0,
        best_budget_bytes=_best(budgets),
        components=[
            forecaster.component(one, outlook.plans[one.name], held[one.name]) for one in parts
        ],
        budgets=budgets,
        notes=setting_notes(order.spec),
    )


@dataclass(frozen=True, slots=True)
class _Outlook:
    """A plan for each component (None: computed on where the host has it), and what all take."""

    plans: Mapping[str, Plan | None]
    device_bytes: int


@dataclass(frozen=True, slots=True)
class _Forecaster:
    order: ForecastOrder
    settings: Settings
    groupings: Mapping[str, Grouping]
    link_bytes_per_s: float

    @property
    def alignment_bytes(self) -> int:
        return (CpuAccelerator if self.order.on_cpu else TorchAccelerator).alignment_bytes

    @property
    def minimum_bytes(self) -> int:
        """What all components keep, and a ring for the largest group."""
        inputs = [self._input(one, Allowance(0), []) for one in self.groupings]
        kept_bytes = sum(one.leftover_bytes for one in inputs)
        return kept_bytes + max(
            (max(one.aligned_sizes_bytes, default=0) for one in inputs), default=0
        )

    @property
    def whole_bytes(self) -> int:
        """What all weights take of a device."""
        inputs = [self._input(one, Allowance(0), []) for one in self.groupings]
        return sum(one.leftover_bytes + sum(one.aligned_sizes_bytes) for one in inputs)

    def outlook(self, budget_bytes: int | None, short: Collection[str]) -> _Outlook:
        """The plans within a device budget; raises OutOfMemory for one that cannot work."""
        allowances = allowances_of(
            self.alignment_bytes, self.settings, self.groupings, budget_bytes, short
        )
        plans: dict[str, Plan | None] = {}
        whole: dict[Allowance, list[Plan]] = {}
        free = Allowance(self._free_bytes())
        is_whole = budget_bytes is None or budget_bytes >= self.whole_bytes
        for name in self.groupings:
            allowance = allowances.get(name, free)
            if self.order.on_cpu and is_whole and name not in short:
                plans[name] = None
                continue
            sharing = [one for one in self.groupings if allowances.get(one, free) is allowance]
            plan = make_plan(self._input(name, allowance, sharing))
            plans[name] = plan
            whole.setdefault(allowance, []).append(plan)
        taken = [self._taken_bytes(allowance, made) for allowance, made in whole.items()]
        in_place = sum(
            self.groupings[name].layout.size_bytes for name, plan in plans.items() if plan is None
        )
        return _Outlook(plans, sum(taken) + in_place)

    def budgets(self) -> list[BudgetStep]:
        """What other budgets would give, from the smallest that works to everything."""
        least, most = self.minimum_bytes, self.whole_bytes
        streamed = {
            name: structs.replace(one, mode="stream") if one.mode == "none" else one
            for name, one in self.settings.items()
        }
        streaming = replace(self, settings=streamed)
        steps = []
        for index in range(BUDGETS_TRIED + 1):
            budget_bytes = least + (most - least) * index // BUDGETS_TRIED
            try:
                plans = streaming.outlook(budget_bytes, set()).plans.values()
            except OutOfMemory:
                continue
            made = [plan for plan in plans if plan is not None]
            compute_s = sum(self.order.compute_s.values()) if not made else 0.0
            steps.append(
                BudgetStep(
                    budget_bytes=budget_bytes,
                    streamed_bytes=sum(plan.streamed_bytes_per_step for plan in made),
                    step_s=sum((plan.predicted_step_s for plan in made), compute_s),
                )
            )
        return steps

    def component(
        self, files: ComponentFiles, plan: Plan | None, host_bytes: int
    ) -> ComponentForecast:
        """One row of the forecast."""
        grouping = self.groupings[files.name]
        compute_s = self.order.compute_s.get(files.name)
        size_bytes = grouping.layout.size_bytes
        return ComponentForecast(
            name=files.name,
            kind=files.class_name,
            bytes=size_bytes,
            offload=self.settings[files.name].mode,
            groups=len(grouping.groups),
            kept_bytes=grouping.kept_bytes,
            resident_bytes=plan.resident_bytes if plan else size_bytes - grouping.kept_bytes,
            ring_bytes=plan.ring_bytes if plan else 0,
            streamed_bytes=plan.streamed_bytes_per_step if plan else 0,
            host_bytes=host_bytes,
            step_s=plan.predicted_step_s if plan else compute_s or 0.0,
            compute_s=compute_s,
        )

    def _input(self, name: str, allowance: Allowance, sharing: Collection[str]) -> PlanInput:
        grouping = self.groupings[name]
        others_bytes = sum(self.groupings[one].kept_bytes for one in sharing if one != name)
        sizes = grouping.sizes_bytes()
        compute_s = self.order.compute_s.get(name, 0.0)
        total_bytes = max(1, sum(sizes))
        return PlanInput(
            sizes_bytes=sizes,
            order=tuple(range(len(sizes))),
            compute_s=tuple(compute_s * size / total_bytes for size in sizes),
            bandwidth_bytes_per_s=self.link_bytes_per_s,
            latency_s=0.0,
            budget_bytes=allowance.limit_bytes - others_bytes,
            leftover_bytes=grouping.kept_bytes,
            alignment_bytes=self.alignment_bytes,
        )

    def _free_bytes(self) -> int:
        free_bytes = self.order.free_bytes
        return free_bytes if self.order.on_cpu else free_bytes - reserve_bytes(free_bytes)

    def _taken_bytes(self, allowance: Allowance, plans: list[Plan]) -> int:
        """What components that share an allowance take once all of them have run."""
        kept_bytes = sum(plan.given.leftover_bytes for plan in plans)
        resident_bytes = sum(plan.resident_bytes for plan in plans)
        ring_bytes = max(plan.ring_bytes for plan in plans)
        return min(allowance.limit_bytes, kept_bytes + resident_bytes + ring_bytes)


def _groupings(
    parts: Sequence[ComponentFiles], description: Description, settings: Settings
) -> dict[str, Grouping]:
    """Each component as loading would cut it, with its features switched on; weights are absent."""
    modules = {
        one.name: skeleton_of(one, description.dtype, settings[one.name].quantization).module
        for one in parts
    }
    spec = description.spec
    switch_on_features(spec.name, modules, settings, spec.own_offloads)
    return {
        name: group_module(module, group_options(settings[name]), casting_of(settings[name]))
        for name, module in modules.items()
    }


def _held_bytes(
    groupings: Mapping[str, Grouping], on_disk: Collection[str], budget_bytes: int | None
) -> dict[str, int]:
    """What the store holds of each component, first come, first served."""
    held: dict[str, int] = {}
    for name, grouping in groupings.items():
        size_bytes = grouping.layout.size_bytes
        fits = budget_bytes is None or sum(held.values()) + size_bytes <= budget_bytes
        held[name] = size_bytes if fits and name not in on_disk else 0
    return held


def _best(budgets: list[BudgetStep]) -> int:
    if not budgets:
        return 0
    fastest_s = min(one.step_s for one in budgets)
    return min(one.budget_bytes for one in budgets if one.step_s <= fastest_s * AS_FAST)
