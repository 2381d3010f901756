"""How close the executor comes to the best possible schedule, on a simulated link in virtual time.

The real engine runs (groups, plan, ring, hooks, events); only the device is simulated. Each block
computes for a known time, copies take latency plus bytes over bandwidth, and the step time that
comes out is divided by what no schedule with that ring could beat. Nothing here depends on how fast
this machine is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from offloadd.offload.accelerator.simulated import Link, SimulatedAccelerator
from offloadd.offload.component import attach_component
from offloadd.offload.grouping.groups import GroupOptions, group_module
from offloadd.offload.planning.plan import Plan, PlanInput, make_plan
from offloadd.offload.planning.schedule import best_possible_step_s
from offloadd.offload.streaming.executor import Executor
from offloadd.offload.streaming.tier import DeviceTier
from offloadd.store.layout import Layout

KIB = 1024
LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=5e-6)
RATIOS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
WARM_STEPS, MEASURED_STEPS = 6, 8
UNIFORM_KIB = (256,) * 24
# A UNet: wide shallow blocks compute long on few weights, the deep ones the other way round.
UNET_KIB = (16, 24, 64, 96, 320, 512, 768, 1024, 1280, 1024, 896, 640, 448, 128, 96, 32, 24)
UNET_WORK = (9, 8, 7, 6, 5, 4, 4, 3, 3, 3, 4, 5, 6, 7, 8, 9, 9)


@dataclass(frozen=True, slots=True)
class Shape:
    """The groups of a model: bytes, and the share of a step's compute that each takes."""

    name: str
    sizes_bytes: tuple[int, ...]
    work: tuple[float, ...]


SHAPES = (
    Shape("uniform", tuple(k * KIB for k in UNIFORM_KIB), (1.0,) * len(UNIFORM_KIB)),
    Shape("unet", tuple(k * KIB for k in UNET_KIB), tuple(float(w) for w in UNET_WORK)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What one run gave; `bound_s` is the best that any schedule with the same ring could do."""

    shape: str
    ratio: float
    budget_share: float
    measured_s: float
    predicted_s: float
    bound_s: float
    compute_s: float
    is_compute_bound: bool
    host_syncs: int
    weight_allocations: int
    host_overhead_s: float


class Block(nn.Module):
    """Weights that are read, and a kernel that takes a known time."""

    def __init__(self, size_bytes: int, seconds: float, device: SimulatedAccelerator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size_bytes // 4), requires_grad=False)
        self.seconds = seconds
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.device.compute(self.seconds)
        return x + self.weight[0] * self.weight[-1]


class Model(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class MemorySource:
    """An extent in memory."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self._bytes = bytearray(layout.size_bytes)
        parameters = dict(module.named_parameters())
        for name, slot in layout.slots().items():
            data = parameters[name].detach().view(torch.uint8).numpy().tobytes()
            self._bytes[slot.offset_bytes : slot.stop_bytes] = data

    def host_view(self) -> memoryview | None:
        return memoryview(self._bytes).toreadonly()

    def release_view(self) -> None:
        return

    def read(self, start_bytes: int, stop_bytes: int, into: memoryview) -> Future[int]:
        into[:] = self._bytes[start_bytes:stop_bytes]
        done: Future[int] = Future()
        done.set_result(0)
        return done


def run_case(shape: Shape, ratio: float, budget_bytes: int) -> Case:
    """Stream the shape under the planner's plan and time steady steps on the virtual clock."""
    total_bytes = sum(shape.sizes_bytes)
    step_s = ratio * total_bytes / LINK.bandwidth_bytes_per_s
    compute_s = tuple(step_s * work / sum(shape.work) for work in shape.work)
    device = SimulatedAccelerator(2 * total_bytes + (1 << 20), LINK, random.Random(1))
    model = Model([Block(*both, device) for both in zip(shape.sizes_bytes, compute_s, strict=True)])
    grouping = group_module(model, GroupOptions(small_limit_bytes=0))
    source = MemorySource(model, grouping.layout)
    plan = make_plan(
        PlanInput(
            sizes_bytes=grouping.sizes_bytes(),
            order=tuple(range(len(shape.sizes_bytes))),
            compute_s=compute_s,
            bandwidth_bytes_per_s=LINK.bandwidth_bytes_per_s,
            latency_s=LINK.latency_s,
            budget_bytes=budget_bytes,
        )
    )
    tier = DeviceTier(device, budget_bytes)
    executor = Executor(device, tier)
    component = attach_component("model", model, grouping, source, device, tier, executor)
    executor.configure("model", plan.resident, plan.ring_bytes)
    case = _timed(shape, ratio, budget_bytes / total_bytes, model, device, executor, plan)
    component.detach()
    return case


def _timed(
    shape: Shape,
    ratio: float,
    budget_share: float,
    model: Model,
    device: SimulatedAccelerator,
    executor: Executor,
    plan: Plan,
) -> Case:
    x = torch.zeros(1)
    with torch.no_grad():
        for _ in range(WARM_STEPS):
            model(x)
        began_s, allocations = device.compute_s, device.allocations
        syncs = executor.counters.host_syncs + device.host_waits - executor.counters.border_waits
        began_real_s = time.perf_counter()
        for _ in range(MEASURED_STEPS):
            model(x)
        real_s = time.perf_counter() - began_real_s
    counters = executor.counters
    work = plan.work()
    bound_s = best_possible_step_s(work, plan.ring_bytes)
    return Case(
        shape=shape.name,
        ratio=ratio,
        budget_share=budget_share,
        measured_s=(device.compute_s - began_s) / MEASURED_STEPS,
        predicted_s=plan.predicted_step_s,
        bound_s=bound_s,
        compute_s=sum(work.compute_s),
        is_compute_bound=bound_s <= sum(work.compute_s) * 1.0001,
        host_syncs=counters.host_syncs + device.host_waits - counters.border_waits - syncs,
        weight_allocations=device.allocations - allocations,
        host_overhead_s=real_s / MEASURED_STEPS / len(shape.sizes_bytes),
    )


def budgets(shape: Shape, points: int) -> Iterator[int]:
    """From one group to everything."""
    smallest, total = max(shape.sizes_bytes), sum(shape.sizes_bytes)
    for point in range(points + 1):
        yield smallest + (total - smallest) * point // points


def figures(cases: Sequence[Case]) -> dict[str, float | int]:
    """The flat summary that goes to the file."""
    uniform_two_slots = [
        case
        for case in cases
        if case.shape == "uniform" and case.budget_share * len(UNIFORM_KIB) >= 2
    ]
    simple_bound = [
        case.measured_s / max(case.compute_s, case.bound_s) for case in uniform_two_slots
    ]
    border = [case.measured_s / case.compute_s for case in cases if case.is_compute_bound]
    return {
        "cases": len(cases),
        "worst_over_bound": round(max(c.measured_s / c.bound_s for c in cases), 4),
        "worst_over_bound_uniform": round(max(simple_bound), 4),
        "worst_over_compute_where_compute_bound": round(max(border), 4),
        "worst_prediction_error": round(
            max(abs(c.predicted_s - c.measured_s) / c.measured_s for c in cases), 4
        ),
        "host_syncs_per_forward": sum(c.host_syncs for c in cases) / len(cases) / MEASURED_STEPS,
        "weight_allocations_per_forward": sum(c.weight_allocations for c in cases)
        / len(cases)
        / MEASURED_STEPS,
        "host_overhead_per_group_s": round(
            sorted(c.host_overhead_s for c in cases)[len(cases) // 2], 6
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer ratios and budgets")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    ratios = RATIOS[1::2] if options.quick else RATIOS
    cases = []
    for shape in SHAPES:
        for ratio in ratios:
            for budget_bytes in budgets(shape, 5 if options.quick else 12):
                case = run_case(shape, ratio, budget_bytes)
                cases.append(case)
                print(
                    f"{case.shape:8} compute/transfer {case.ratio:4.2f} budget "
                    f"{case.budget_share:4.0%}  {case.measured_s * 1e3:8.3f} ms  over bound "
                    f"{case.measured_s / case.bound_s:.4f}  predicted {case.predicted_s * 1e3:8.3f}"
                )
    result = figures(cases)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
