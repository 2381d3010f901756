"""A sweep loads each group once for all who take part, and each draws what it draws alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload.rig import cpu_device, rig, simulated_device
from offload.sweep_jobs import Job, alone, jobs, room_of, sweep
from offload.tiny_models import TINY_MODELS
from torch import nn

from offload_protocol.errors import Cancelled
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.accelerator.simulated import SimulatedAccelerator

STEPS = (5, 3, 4, 5, 2, 5, 1, 4)
"""For eight jobs, in eight shapes."""


@pytest.mark.parametrize("family", ["flux", "sd_unet"])
@pytest.mark.parametrize("make_device", [cpu_device, simulated_device])
def test_eight_jobs_in_eight_shapes_take_the_loads_of_the_longest_and_draw_as_alone(
    family: str, make_device: Callable[[], Accelerator], tmp_path: Path
) -> None:
    wanted = jobs(family, STEPS)
    expected = alone(family, wanted)
    module = TINY_MODELS[family].build()
    with rig(make_device(), tmp_path) as streamed:
        component = streamed.stream("model", module, ring_groups=1)
        passing_bytes = sum(component.grouping.sizes_bytes())
        drawn = sweep(room_of(streamed.executor), module, wanted)
        moved_bytes = streamed.executor.counters.moved_bytes
        component.detach()
    assert all(map(torch.equal, drawn, expected))
    # A pass of the longest job is a pass of all; what was fetched ahead at the end comes on top.
    assert moved_bytes <= (max(STEPS) + 1) * passing_bytes
    assert moved_bytes < 0.25 * sum(STEPS) * passing_bytes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keep_every", [0, 3])
def test_members_leave_no_race_on_a_device_with_delays(
    seed: int, keep_every: int, tmp_path: Path
) -> None:
    device: SimulatedAccelerator = simulated_device(seed)
    wanted = jobs("flux", (2, 3, 1))
    module = TINY_MODELS["flux"].build()
    with rig(device, tmp_path) as streamed:
        component = streamed.stream("model", module, keep_every=keep_every, ring_groups=2.5)
        drawn = sweep(room_of(streamed.executor), module, wanted, device.watched)
        component.detach()
    assert [str(hazard) for hazard in device.hazards] == []
    assert all(map(torch.equal, drawn, alone("flux", wanted)))


def test_groups_that_stay_are_not_loaded_again_and_do_not_part_the_members(tmp_path: Path) -> None:
    wanted = jobs("flux", (4, 4, 4, 4))
    module = TINY_MODELS["flux"].build()
    with rig(cpu_device(), tmp_path) as streamed:
        component = streamed.stream("model", module, keep_every=2, ring_groups=1)
        sizes = component.grouping.sizes_bytes()
        drawn = sweep(room_of(streamed.executor), module, wanted)
        moved_bytes = streamed.executor.counters.moved_bytes
        component.detach()
    assert all(map(torch.equal, drawn, alone("flux", wanted)))
    assert moved_bytes <= sum(sizes[::2]) + 5 * sum(sizes[1::2])


def test_a_job_that_joins_midway_draws_as_alone_and_so_do_those_that_it_joins(
    tmp_path: Path,
) -> None:
    first, late = jobs("flux", (5, 4))
    module = TINY_MODELS["flux"].build()
    joined = []
    with rig(cpu_device(), tmp_path) as streamed:
        component = streamed.stream("model", module)
        room = room_of(streamed.executor)

        def let_join(step: int) -> None:
            if step == 2:
                joined.append(room.join(late.name, lambda: late.draw(module)))

        drawn = room.join(first.name, lambda: first.draw(module, let_join))
        assert not room.run()
        passes = room.passes
        component.detach()
    expected = alone("flux", [first, late])
    assert torch.equal(drawn.result(), expected[0])
    assert torch.equal(joined[0].result(), expected[1])
    assert passes == 7, "two of five steps together"


def _cancel_at(count: int) -> Callable[[str], None]:
    borders = iter(range(count))

    def on_border(component: str) -> None:
        if next(borders, None) is None:
            raise Cancelled("the job was cancelled")

    return on_border


def test_cancel_and_error_of_members_leave_the_others_and_the_next_sweep_as_they_were(
    tmp_path: Path,
) -> None:
    wanted = jobs("flux", (4, 4, 4))
    expected = alone("flux", wanted)
    module = TINY_MODELS["flux"].build()

    def fail_inside() -> None:
        with torch.no_grad():
            inputs = TINY_MODELS["flux"].example_inputs()
            module(**{**inputs, "img_ids": inputs["img_ids"][:3]})

    with rig(cpu_device(), tmp_path) as streamed:
        component = streamed.stream("model", module, ring_groups=1)
        room = room_of(streamed.executor)
        futures = [room.join(job.name, lambda job=job: job.draw(module)) for job in wanted]  # type: ignore[misc]
        failing = room.join("failing", fail_inside)
        stopped = Job("flux", 5, 6)
        cancelled = room.join("cancelled", lambda: stopped.draw(module), on_border=_cancel_at(2))
        assert not room.run()
        assert all(group.users == 0 for group in component.groups)
        again = sweep(room, module, wanted)
        component.detach()
    assert isinstance(failing.exception(), RuntimeError)
    assert isinstance(cancelled.exception(), Cancelled)
    drawn = [future.result() for future in futures]
    assert all(map(torch.equal, drawn, expected))
    assert all(map(torch.equal, again, expected))


def test_whoever_is_cancelled_while_all_wait_for_the_owner_stops_in_the_next_run(
    tmp_path: Path,
) -> None:
    wanted = jobs("flux", (3, 3))
    module = TINY_MODELS["flux"].build()
    is_cancelled = False

    def look(component: str) -> None:
        if is_cancelled:
            raise Cancelled("the job was cancelled")

    with rig(cpu_device(), tmp_path) as streamed:
        component = streamed.stream("model", module)
        room = room_of(streamed.executor)
        stopped = room.join("a", lambda: wanted[0].draw(module), on_border=look)
        going = room.join("b", lambda: wanted[1].draw(module))
        assert room.run(until=lambda: room.passes > 0)
        forwards = streamed.executor.counters.forwards
        is_cancelled = True
        room.hurry("a")
        assert room.run(until=lambda: True)
        assert isinstance(stopped.exception(timeout=0), Cancelled)
        assert streamed.executor.counters.forwards == forwards, "nobody else went on"
        assert room.members == ("b",)
        assert not room.run()
        component.detach()
    assert torch.equal(going.result(), alone("flux", wanted)[1])


def test_between_runs_the_owner_may_use_the_model_itself(tmp_path: Path) -> None:
    wanted = jobs("flux", (3, 2))
    owners = Job("flux", 6, 2)
    module = TINY_MODELS["flux"].build()
    with rig(cpu_device(), tmp_path) as streamed:
        component = streamed.stream("model", module, ring_groups=1)
        room = room_of(streamed.executor)
        futures = [room.join(job.name, lambda job=job: job.draw(module)) for job in wanted]  # type: ignore[misc]
        between: list[torch.Tensor] = []
        while room.run(until=lambda: room.passes > len(between)):
            between.append(owners.draw(module))
        component.detach()
    expected = alone("flux", [*wanted, owners])
    assert len(between) == 3
    assert all(torch.equal(one, expected[2]) for one in between)
    assert all(map(torch.equal, (future.result() for future in futures), expected))


def test_each_member_has_the_global_random_numbers_that_it_has_alone(tmp_path: Path) -> None:
    module = TINY_MODELS["flux"].build()
    wanted = jobs("flux", (3, 3, 2))

    def work(job: Job) -> torch.Tensor:
        torch.manual_seed(job.index)
        drawn: list[torch.Tensor] = []
        job.draw(module, lambda step: drawn.append(torch.rand(2 + step)))
        return torch.cat(drawn)

    with rig(cpu_device(), tmp_path) as streamed:
        component = streamed.stream("model", module)
        room = room_of(streamed.executor)
        torch.manual_seed(99)
        before = torch.get_rng_state()
        futures = [room.join(job.name, lambda job=job: work(job)) for job in wanted]  # type: ignore[misc]
        assert not room.run()
        assert torch.equal(torch.get_rng_state(), before), "nor does the owner notice"
        component.detach()
    for job, future in zip(wanted, futures, strict=True):
        torch.manual_seed(job.index)
        expected = torch.cat([torch.rand(2 + step) for step in range(job.steps)])
        assert torch.equal(future.result(), expected)


class Winding(nn.Module):
    """Layers taken in the order that the call asks for, under a weight that all of it uses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.shift = nn.Parameter(torch.randn(32, generator=generator))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x)) + self.shift
        return x + self.shift


orders = st.lists(st.integers(0, 4), max_size=7) | st.just(list(range(5)))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(orders, max_size=3), min_size=1, max_size=4), st.integers(0, 3))
def test_any_orders_of_any_members_give_their_own_numbers(
    all_orders: list[list[list[int]]], cancelled: int
) -> None:
    starts = [torch.full((2 + number, 32), 0.1 * number) for number in range(len(all_orders))]
    resident = Winding()
    expected = [
        [resident(start, order) for order in steps]
        for start, steps in zip(starts, all_orders, strict=True)
    ]
    module = Winding()
    device = simulated_device(7)
    with TemporaryDirectory() as folder, rig(device, Path(folder)) as streamed:
        component = streamed.stream("model", module, ring_groups=1)
        room = room_of(streamed.executor)

        def work(number: int) -> list[torch.Tensor]:
            with device.watched():
                return [module(starts[number], order) for order in all_orders[number]]

        futures = [
            room.join(
                f"job {number}",
                lambda number=number: work(number),  # type: ignore[misc]
                on_border=_cancel_at(1 if number == cancelled else 99),
            )
            for number in range(len(all_orders))
        ]
        assert not room.run()
        assert all(group.users == 0 for group in component.groups)
        component.detach()
    assert device.hazards == []
    for number, future in enumerate(futures):
        if number == cancelled and len(all_orders[number]) > 1:
            assert isinstance(future.exception(), Cancelled)
        else:
            assert all(map(torch.equal, future.result(), expected[number]))


def test_a_member_in_another_order_costs_at_most_its_own_loads(tmp_path: Path) -> None:
    module = Winding()
    x, steps = torch.ones(1, 32), 3
    with rig(cpu_device(), tmp_path) as streamed:
        component = streamed.stream("model", module, ring_groups=1)
        room = room_of(streamed.executor)
        for name in ("a", "b", "c"):
            room.join(name, lambda: [module(x, range(5)) for _ in range(steps)])
        room.join("back", lambda: [module(x, range(4, -1, -1)) for _ in range(steps)])
        assert not room.run()
        moved_bytes = streamed.executor.counters.moved_bytes
        component.detach()
        total_bytes = sum(component.grouping.sizes_bytes())
    assert moved_bytes <= (2 * steps + 1) * total_bytes


@pytest.mark.parametrize("family", sorted(TINY_MODELS))
def test_no_family_keeps_state_of_a_forward_in_its_modules(family: str, tmp_path: Path) -> None:
    tiny = TINY_MODELS[family]
    module = tiny.build()
    inputs = [tiny.example_inputs(seed) for seed in (1, 2, 3)]
    expected = [tiny.run(module, one) for one in inputs]
    with rig(cpu_device(), tmp_path) as streamed:
        component = streamed.stream("model", module, ring_groups=1)
        room = room_of(streamed.executor)
        futures = [
            room.join(str(number), lambda one=one: [tiny.run(module, one) for _ in range(2)])  # type: ignore[misc]
            for number, one in enumerate(inputs)
        ]
        assert not room.run()
        component.detach()
    for future, picture in zip(futures, expected, strict=True):
        assert all(torch.equal(one, picture) for one in future.result())
