"""Hosts a pipeline's modules on the engine as a plan says, and takes them off again.

`none`, `stream`, `model`, `sequential` and `group` are presets of one engine (`presets`); each
gives the picture that a plain script gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack

import torch
from torch import nn

from offload_protocol.errors import OutOfMemory
from offload_protocol.sizes import format_size
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.loading.parts import Source
from offloadd.hosting.placing.offload_plan import Plan
from offloadd.hosting.placing.presets import casting_of, group_options, most_bytes, whole_bytes
from offloadd.hosting.placing.recasting import Recasting
from offloadd.hosting.running.global_state import keeps_steps_in_modules
from offloadd.offload.engine_stats import ComponentStats
from offloadd.offload.grouping.groups import Grouping, group_module
from offloadd.offload.planning.allowances import Allowance
from offloadd.offload.weights.casting import StoredAs
from offloadd.store.layout import align


class Placement:
    """A pipeline's modules on the engine; every weight is where the engine's plans say."""

    def __init__(self, host: DeviceHost, model: str, plan: Plan) -> None:
        self.plan = plan
        self.weights_bytes: dict[str, int] = {}
        """Of each component, in the dtypes that it is stored in."""
        self.is_there = True
        self.swept: list[str] = []
        """On the engine, those that are streamed and entered by their forward, so that jobs share
        them; none that keeps a call's state in its modules."""
        self._host = host
        self._model = model
        self._recastings: dict[str, Recasting] = {}

    def remove(self) -> None:
        """Take the modules off the device; they cannot be used after."""
        self.is_there = False
        for name in self.plan:
            self._host.engine.detach(self._name(name))
            if name in self._recastings:
                self._recastings.pop(name).remove()

    def restore(self) -> None:
        """Give components back the dtype that a job changed and did not change back."""
        for recasting in self._recastings.values():
            recasting.restore()

    def settle(self) -> None:
        """Let plans go on that have measured enough; call after each job."""
        self._host.engine.settle()

    @property
    def hosted(self) -> dict[str, str]:
        """The engine's name of each component."""
        return {name: self._name(name) for name in self.plan}

    def stats(self) -> dict[str, ComponentStats]:
        """Where each component's weights are now; nothing of it once they were removed."""
        if not self.is_there:
            return {}
        found = {one.name: one for one in self._host.engine.stats().components}
        return {name: found[self._name(name)] for name in self.plan}

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each component's weights that are on the device now.

        On a CPU, weights that are computed on in place rest in the same memory; modes that keep
        nothing on the device count none as resident then.
        """
        return {name: self._resident(name, one) for name, one in self.stats().items()}

    def _resident(self, name: str, stats: ComponentStats) -> int:
        if not stats.in_place:
            return stats.resident_bytes
        rests = self.plan[name].mode in ("sequential", "group")
        return (0 if rests else self.weights_bytes[name]) + stats.adapter_bytes

    def attach(
        self,
        name: str,
        module: nn.Module,
        source: Source,
        allowance: Allowance | None,
    ) -> None:
        """Put one component on the engine."""
        slots = source.layout.slots().values()
        self.weights_bytes[name] = sum(slot.spec.size_bytes for slot in slots)
        self._host.engine.attach(
            self._name(name),
            module,
            source,
            group_options(self.plan[name]),
            casting_of(self.plan[name]),
            allowance,
        )
        is_streamed = not self._host.engine.is_in_place(self._name(name))
        if is_streamed and not hasattr(module, "decode") and not keeps_steps_in_modules([module]):
            self.swept.append(self._name(name))

        def recast(module: nn.Module, dtype: torch.dtype) -> None:
            engine = self._host.engine
            engine.detach(self._name(name))
            type(module).to(module, dtype)
            stored, options = StoredAs(source.layout), group_options(self.plan[name])
            engine.attach(self._name(name), module, source, options, stored, allowance)

        self._recastings[name] = Recasting(module, recast)

    def _name(self, component: str) -> str:
        return f"{self._model}/{component}"


def apply_plan(
    host: DeviceHost,
    model: str,
    parts: Mapping[str, nn.Module],
    sources: Mapping[str, Source],
    plan: Plan,
    budget_bytes: int | None = None,
) -> Placement:
    """Place each component as the plan says, all within the model's own budget if it has one.

    Raises `InvalidRequest` for what a component cannot have, `OutOfMemory` with the smallest
    budget that works; nothing is left behind then.
    """
    placement = Placement(host, model, plan)
    groupings = {
        name: group_module(parts[name], group_options(offload), casting_of(offload))
        for name, offload in plan.items()
    }
    short: set[str] = set()
    if host.computes_in_host_memory and budget_bytes is None:
        short = {name for name in plan if sources[name].host_view() is None}
    allowances = allowances_of(host.alignment_bytes, plan, groupings, budget_bytes, short)
    with ExitStack() as undo:
        undo.callback(placement.remove)
        for name in plan:
            placement.attach(name, parts[name], sources[name], allowances.get(name))
        undo.pop_all()
    return placement


def allowances_of(
    alignment_bytes: int,
    plan: Plan,
    groupings: Mapping[str, Grouping],
    budget_bytes: int | None,
    short: Collection[str],
) -> dict[str, Allowance]:
    """What bounds each component; those that share one give way to each other."""
    alone: dict[str, Allowance] = {}
    for name, grouping in groupings.items():
        limit = most_bytes(plan[name], grouping, alignment_bytes, is_short=name in short)
        if limit is not None:
            alone[name] = Allowance(limit)
    sharing = {name: one for name, one in groupings.items() if name not in alone}
    swapped = {name: one for name, one in sharing.items() if plan[name].mode == "model"}
    if budget_bytes is not None:
        left_bytes = budget_bytes - sum(one.limit_bytes for one in alone.values())
        _check_budget(budget_bytes, left_bytes, sharing, alignment_bytes)
        shared = Allowance(min(left_bytes, _largest(swapped, alignment_bytes)))
        if len(swapped) < len(sharing):
            shared = Allowance(left_bytes)
        return {**alone, **dict.fromkeys(sharing, shared)}
    return {**alone, **dict.fromkeys(swapped, Allowance(_largest(swapped, alignment_bytes)))}


def _largest(groupings: Mapping[str, Grouping], alignment_bytes: int) -> int:
    """What the largest of these takes, beside what the others keep on the device for good."""
    kept = sum(one.kept_bytes for one in groupings.values())
    return max(
        (whole_bytes(one, alignment_bytes) - one.kept_bytes + kept for one in groupings.values()),
        default=0,
    )


def _check_budget(
    budget_bytes: int, left_bytes: int, groupings: Mapping[str, Grouping], alignment_bytes: int
) -> None:
    kept = sum(one.kept_bytes for one in groupings.values())
    largest = max(
        (align(size, alignment_bytes) for one in groupings.values() for size in one.sizes_bytes()),
        default=0,
    )
    smallest = budget_bytes - left_bytes + kept + largest
    if left_bytes < kept + largest:
        raise OutOfMemory(
            f"a device_budget of {format_size(budget_bytes)} ({budget_bytes} bytes) is too small; "
            f"the smallest that works is {format_size(smallest)} ({smallest} bytes)",
            hint=f"set device_budget to at least {smallest}, or cut the model finer, for example "
            'with mode = "sequential"',
            details={"minimum_budget_bytes": smallest, "budget_bytes": budget_bytes},
        )
