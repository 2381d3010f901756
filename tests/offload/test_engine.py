"""The engine as its users see it: attach, run within a budget, recover, let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from offload.rig import cpu_device, disk_source, host_source, simulated_device
from offload.tiny_models import TINY_MODELS
from torch import nn

from offload_protocol.errors import (
    Cancelled,
    InvalidRequest,
    ModelLoadFailed,
    OutOfMemory,
    StorageFailed,
)
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.engine import Engine
from offloadd.offload.grouping.groups import GroupOptions, module_layout
from offloadd.store.source import WeightSource

LEAVES = GroupOptions("leaf_level", small_limit_bytes=0)
BLOCKS = GroupOptions("block_level", small_limit_bytes=0)


@contextmanager
def _hosted(
    engine: Engine,
    directory: Path,
    modules: dict[str, nn.Module],
    options: GroupOptions = BLOCKS,
    *,
    in_memory: bool = False,
) -> Iterator[Engine]:
    with ExitStack() as files:
        for name, module in modules.items():
            path = directory / f"{name}.safetensors"
            source: WeightSource
            if in_memory:
                source = files.enter_context(host_source(module, path))
            else:
                source = files.enter_context(disk_source(module, path))
            engine.attach(name, module, source, options)
        yield engine
        engine.close()


def _budget(module: nn.Module, share: float) -> int:
    return int(module_layout(module).size_bytes * share)


DEVICES: dict[str, Callable[[], Accelerator]] = {"cpu": cpu_device, "link": simulated_device}


@pytest.mark.parametrize("share", [0.4, 0.7, 2.0])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["flux", "sdxl_unet", "t5"])
def test_every_step_from_the_first_pass_to_the_settled_plan_is_exact(
    name: str, device: str, share: float, tmp_path: Path
) -> None:
    family = TINY_MODELS[name]
    module = family.build()
    expected = family.run(family.build(), family.example_inputs())
    accelerator = DEVICES[device]()
    engine = Engine(accelerator, _budget(module, share))
    with _hosted(engine, tmp_path, {name: module}, in_memory=accelerator.has_dma):
        for _ in range(12):
            assert torch.equal(family.run(module, family.example_inputs()), expected)
            stats = engine.stats()
            assert stats.resident_bytes + stats.ring_bytes <= engine.budget_bytes
        plan = engine.plan(name)
        assert engine.stats().components[0].stage == "settled"
        assert plan is not None
        assert plan.given.order
        assert (len(plan.resident) == len(plan.given.sizes_bytes)) == (share > 1)


def test_steady_steps_miss_nothing_and_allocate_nothing(tmp_path: Path) -> None:
    family = TINY_MODELS["flux"]
    module = family.build()
    device = simulated_device()
    engine = Engine(device, _budget(module, 0.5))
    with _hosted(engine, tmp_path, {"flux": module}, in_memory=True):
        for _ in range(12):
            family.run(module, family.example_inputs())
        misses, syncs = engine.counters.misses, engine.counters.host_syncs
        allocations, moved = device.allocations, engine.counters.moved_bytes
        for _ in range(5):
            family.run(module, family.example_inputs())
        assert engine.counters.misses == misses
        assert engine.counters.host_syncs == syncs == 0
        assert device.allocations == allocations
        plan = engine.plan("flux")
        assert plan is not None
        assert engine.counters.moved_bytes - moved == 5 * plan.streamed_bytes_per_step


def test_a_budget_that_cannot_work_names_the_smallest_that_does(tmp_path: Path) -> None:
    family = TINY_MODELS["flux"]
    module = family.build()
    expected = family.run(module, family.example_inputs())
    with disk_source(module, tmp_path / "flux.safetensors") as source:
        engine = Engine(cpu_device(), 1000)
        with pytest.raises(OutOfMemory) as refused:
            engine.attach("flux", module, source, BLOCKS)
        assert torch.equal(family.run(module, family.example_inputs()), expected)
        minimum = refused.value.details["minimum_budget_bytes"]
        with pytest.raises(OutOfMemory):
            Engine(cpu_device(), minimum - 1).attach("flux", module, source, BLOCKS)
        roomy = Engine(cpu_device(), minimum)
        roomy.attach("flux", module, source, BLOCKS)
        for _ in range(8):
            assert torch.equal(family.run(module, family.example_inputs()), expected)
        roomy.close()


def test_idle_components_give_way_to_the_one_that_runs(tmp_path: Path) -> None:
    first, second = TINY_MODELS["flux"], TINY_MODELS["sd3"]
    modules = {"flux": first.build(), "sd3": second.build()}
    expected = {
        "flux": first.run(modules["flux"], first.example_inputs()),
        "sd3": second.run(modules["sd3"], second.example_inputs()),
    }
    device = simulated_device()
    budget_bytes = int(1.1 * max(_budget(module, 1.0) for module in modules.values()))
    engine = Engine(device, budget_bytes)
    with _hosted(engine, tmp_path, modules, in_memory=True), device.watched():
        for name in ("flux", "sd3") * 3:
            family = TINY_MODELS[name]
            for _ in range(8):
                answer = family.run(modules[name], family.example_inputs())
                assert torch.equal(answer, expected[name])
                assert device.allocated_bytes <= budget_bytes
            running = next(c for c in engine.stats().components if c.name == name)
            assert running.resident_bytes > 0.5 * running.size_bytes
    assert device.hazards == []


def test_the_idle_model_gives_way_group_by_group_and_comes_back(tmp_path: Path) -> None:
    first, second = TINY_MODELS["flux"], TINY_MODELS["sd3"]
    modules = {"flux": first.build(), "sd3": second.build()}
    expected = {
        "flux": first.run(modules["flux"], first.example_inputs()),
        "sd3": second.run(modules["sd3"], second.example_inputs()),
    }
    device = simulated_device()
    engine = Engine(device, int(0.8 * sum(_budget(module, 1.0) for module in modules.values())))

    def resident_bytes() -> dict[str, int]:
        return {one.name: one.resident_bytes for one in engine.stats().components}

    with _hosted(engine, tmp_path, modules, in_memory=True), device.watched():
        for round_number in range(3):
            own: dict[str, int] = {}
            idle: dict[str, int] = {}
            for name, other in (("flux", "sd3"), ("sd3", "flux")):
                family = TINY_MODELS[name]
                for _ in range(8):
                    answer = family.run(modules[name], family.example_inputs())
                    assert torch.equal(answer, expected[name])
                    assert device.allocated_bytes <= engine.budget_bytes
                own[name], idle[other] = resident_bytes()[name], resident_bytes()[other]
            if round_number:
                assert 0 < idle["flux"] < own["flux"], "it gave way by some groups, and came back"
                assert 0 < idle["sd3"] < own["sd3"]
    assert device.hazards == []


def test_a_model_that_filled_the_budget_runs_beside_one_that_keeps_some_of_it(
    tmp_path: Path,
) -> None:
    first, second = TINY_MODELS["sd3"], TINY_MODELS["t5"]
    modules = {"sd3": first.build(), "t5": second.build()}
    expected = first.run(modules["sd3"], first.example_inputs())
    engine = Engine(simulated_device(), _budget(modules["sd3"], 1.0))
    with (
        host_source(modules["sd3"], tmp_path / "first") as source,
        host_source(modules["t5"], tmp_path / "second") as other,
    ):
        engine.attach("sd3", modules["sd3"], source, BLOCKS)
        for _ in range(8):
            first.run(modules["sd3"], first.example_inputs())
        engine.attach("t5", modules["t5"], other, GroupOptions())
        for _ in range(3):
            second.run(modules["t5"], second.example_inputs())
            assert torch.equal(first.run(modules["sd3"], first.example_inputs()), expected)
            stats = engine.stats()
            assert stats.resident_bytes + stats.ring_bytes <= engine.budget_bytes
        engine.close()


def test_groups_are_fetched_ahead_across_the_components_of_a_pipeline(tmp_path: Path) -> None:
    names = ("t5", "flux", "vae")
    modules = {name: TINY_MODELS[name].build() for name in names}
    device = simulated_device()
    engine = Engine(device, sum(_budget(module, 0.5) for module in modules.values()))

    def picture() -> None:
        for name, steps in (("t5", 1), ("flux", 4), ("vae", 1)):
            for _ in range(steps):
                TINY_MODELS[name].run(modules[name], TINY_MODELS[name].example_inputs())
        engine.settle()

    with _hosted(engine, tmp_path, modules, in_memory=True):
        for _ in range(12):
            picture()
        misses = engine.counters.misses
        picture()
        assert engine.counters.misses == misses


class _Broken(Exception):
    pass


@pytest.mark.parametrize("error", [_Broken, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [0, 1, 7])
def test_case_28_an_exception_inside_a_block_leaves_the_next_call_right(
    step: int, device: str, error: type[BaseException], tmp_path: Path
) -> None:
    family = TINY_MODELS["sd3"]
    module = family.build()
    expected = family.run(module, family.example_inputs())
    accelerator = DEVICES[device]()
    engine = Engine(accelerator, _budget(module, 0.5))
    block = module.get_submodule("transformer_blocks.1.ff")

    def fail(*_: Any) -> None:
        raise error("in the middle")

    with _hosted(engine, tmp_path, {"sd3": module}, in_memory=accelerator.has_dma):
        for _ in range(step):
            family.run(module, family.example_inputs())
        broken = block.register_forward_hook(fail)
        with pytest.raises(error):
            family.run(module, family.example_inputs())
        broken.remove()
        for _ in range(4):
            assert torch.equal(family.run(module, family.example_inputs()), expected)


@pytest.mark.parametrize("step", [0, 1, 7])
def test_case_30_a_cancel_at_a_border_leaves_the_next_call_right(step: int, tmp_path: Path) -> None:
    family = TINY_MODELS["flux"]
    module = family.build()
    expected = family.run(module, family.example_inputs())
    device = simulated_device()
    engine = Engine(device, _budget(module, 0.5))

    def cancel(component: str) -> None:
        raise Cancelled(f"{component} was cancelled")

    with _hosted(engine, tmp_path, {"flux": module}, in_memory=True), device.watched():
        for _ in range(step):
            family.run(module, family.example_inputs())
        engine.on_border = cancel
        with pytest.raises(Cancelled, match="flux"):
            family.run(module, family.example_inputs())
        engine.on_border = lambda component: None
        for _ in range(4):
            assert torch.equal(family.run(module, family.example_inputs()), expected)
    assert device.hazards == []


def test_case_4_branches_and_skipped_blocks_are_right_whatever_the_first_call_ran(
    tmp_path: Path,
) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(16, 16)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

        def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
            for index in order:
                x = torch.tanh(self.blocks[index](x))
            result: torch.Tensor = self.last(x)
            return result

    torch.manual_seed(0)
    module = Branching().requires_grad_(False)
    x = torch.randn(3, 16)
    orders = [(0, 1, 2, 3, 4, 5), (5, 4, 3), (0, 0, 0, 1, 0, 1), (), (2, 2), (0, 2, 4, 1)] * 3
    with torch.no_grad():
        expected = [module(x, order) for order in orders]
        device = simulated_device()
        engine = Engine(device, _budget(module, 0.45))
        with _hosted(engine, tmp_path, {"m": module}, LEAVES, in_memory=True), device.watched():
            for order, answer in zip(orders, expected, strict=True):
                assert torch.equal(module(x, order), answer)
    assert device.hazards == []


def test_weights_that_a_parent_reads_are_moved_to_the_parents_group(tmp_path: Path) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, x, x, need_weights=False)[0]
            return x

    torch.manual_seed(0)
    module = Attending().eval().requires_grad_(False)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = module(x)
        device = simulated_device()
        engine = Engine(device, _budget(module, 0.8))
        with _hosted(engine, tmp_path, {"m": module}, LEAVES, in_memory=True), device.watched():
            for _ in range(8):
                assert torch.equal(module(x), expected)
            misses = engine.counters.misses
            assert torch.equal(module(x), expected)
            assert engine.counters.misses == misses
    assert device.hazards == []


def test_case_2_a_helper_that_reads_parameters_outside_forward_gets_the_numbers(
    tmp_path: Path,
) -> None:
    family = TINY_MODELS["prior"]
    module = family.build()
    latents = torch.randn(1, 16)
    helper: Any = module
    expected = helper.post_process_latents(latents)
    engine = Engine(cpu_device(), _budget(module, 0.6))
    with _hosted(engine, tmp_path, {"prior": module}, LEAVES):
        for _ in range(3):
            assert torch.equal(helper.post_process_latents(latents), expected)
            family.run(module, family.example_inputs())


def test_case_6_a_model_answers_its_execution_device_and_dtype(tmp_path: Path) -> None:
    for name in ("flux", "t5", "clip", "vae"):
        module: Any = TINY_MODELS[name].build(dtype=torch.bfloat16)
        engine = Engine(cpu_device(), _budget(module, 0.9))
        with _hosted(engine, tmp_path, {name: module}, LEAVES):
            assert module.device == torch.device("cpu")
            assert module.dtype == torch.bfloat16
            assert next(module.parameters()).device == torch.device("cpu")


@pytest.mark.parametrize("options", [BLOCKS, LEAVES], ids=["block", "leaf"])
def test_case_20_a_dropped_model_is_gone_at_once_with_all_its_memory(
    options: GroupOptions, tmp_path: Path
) -> None:
    family = TINY_MODELS["flux"]
    module = family.build()
    device = simulated_device()
    engine = Engine(device, _budget(module, 0.5))
    gc.collect()
    gc.disable()
    try:
        with host_source(module, tmp_path / "flux.safetensors") as source:
            engine.attach("flux", module, source, options)
            for _ in range(10):
                family.run(module, family.example_inputs())
            assert device.allocated_bytes > 0
            gone = weakref.ref(module)
            del module
            assert gone() is None
            assert engine.stats().components == ()
            assert device.allocated_bytes == 0
    finally:
        gc.enable()


def test_detached_weights_are_meta_and_hooks_are_gone(tmp_path: Path) -> None:
    family = TINY_MODELS["t5"]
    module = family.build()
    engine = Engine(cpu_device(), _budget(module, 0.6))
    with _hosted(engine, tmp_path, {"t5": module}):
        family.run(module, family.example_inputs())
    assert all(type(p) is nn.Parameter and p.is_meta for p in module.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_case_51_a_second_component_of_the_same_name_is_refused(tmp_path: Path) -> None:
    module = TINY_MODELS["t5"].build()
    engine = Engine(cpu_device(), _budget(module, 1.5))
    with _hosted(engine, tmp_path, {"t5": module}):
        with (
            disk_source(TINY_MODELS["t5"].build(), tmp_path / "again.safetensors") as source,
            pytest.raises(InvalidRequest, match="already"),
        ):
            engine.attach("t5", TINY_MODELS["t5"].build(), source)
        TINY_MODELS["t5"].run(module, TINY_MODELS["t5"].example_inputs())


def test_weights_of_another_module_are_refused(tmp_path: Path) -> None:
    with disk_source(TINY_MODELS["t5"].build(), tmp_path / "t5.safetensors") as source:
        engine = Engine(cpu_device(), 1 << 30)
        with pytest.raises(ModelLoadFailed, match="another module"):
            engine.attach("clip", TINY_MODELS["clip"].build(), source)


def test_weights_that_the_host_has_are_used_where_they_are(tmp_path: Path) -> None:
    family = TINY_MODELS["flux"]
    module = family.build()
    expected = family.run(module, family.example_inputs())
    engine = Engine(cpu_device(), 0)
    with host_source(module, tmp_path / "flux.safetensors") as source:
        engine.attach("flux", module, source, BLOCKS)
        assert torch.equal(family.run(module, family.example_inputs()), expected)
        assert engine.stats().components[0].in_place
        assert engine.counters.moved_bytes == 0
        engine.close()


def test_replanning_for_another_budget_keeps_the_numbers(tmp_path: Path) -> None:
    family = TINY_MODELS["sd3"]
    module = family.build()
    expected = family.run(module, family.example_inputs())
    device = simulated_device()
    engine = Engine(device, _budget(module, 0.8))
    with _hosted(engine, tmp_path, {"sd3": module}, in_memory=True), device.watched():
        for share in (0.8, 0.4, 1.5, 0.5):
            engine.replan(budget_bytes=_budget(module, share))
            for _ in range(9):
                assert torch.equal(family.run(module, family.example_inputs()), expected)
                assert device.allocated_bytes <= engine.budget_bytes
        with pytest.raises(OutOfMemory):
            engine.replan(budget_bytes=1000)
        assert torch.equal(family.run(module, family.example_inputs()), expected)
    assert device.hazards == []


def test_a_checkpoint_that_vanishes_fails_the_call_and_not_the_engine(tmp_path: Path) -> None:
    broken, sound = TINY_MODELS["flux"], TINY_MODELS["t5"]
    modules = {"flux": broken.build(), "t5": sound.build()}
    expected = sound.run(modules["t5"], sound.example_inputs())
    engine = Engine(cpu_device(), sum(_budget(module, 0.6) for module in modules.values()))
    with _hosted(engine, tmp_path, modules):
        broken.run(modules["flux"], broken.example_inputs())
        with (tmp_path / "flux.safetensors").open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(StorageFailed, match=r"flux\.safetensors"):
            broken.run(modules["flux"], broken.example_inputs())
        for _ in range(3):
            assert torch.equal(sound.run(modules["t5"], sound.example_inputs()), expected)


def test_memory_that_the_device_does_not_have_is_reported_with_the_plan(tmp_path: Path) -> None:
    family = TINY_MODELS["flux"]
    module = family.build()
    expected = family.run(module, family.example_inputs())
    device = simulated_device()
    engine = Engine(device, _budget(module, 0.5))
    with _hosted(engine, tmp_path, {"flux": module}, in_memory=True):
        for _ in range(10):
            family.run(module, family.example_inputs())
        engine.replan()  # gives residents up, and the ring with them
        other = device.allocate(device.capacity_bytes - device.allocated_bytes)
        assert device.memory().free_bytes == 0
        for _ in range(6):
            assert torch.equal(family.run(module, family.example_inputs()), expected)
        del other
        for _ in range(6):
            assert torch.equal(family.run(module, family.example_inputs()), expected)


def test_mutable_arguments_keep_their_identity(tmp_path: Path) -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x)
                cache[str(index)] = x
            return x

    module = Caching().requires_grad_(False)
    engine = Engine(cpu_device(), _budget(module, 0.7))
    with _hosted(engine, tmp_path, {"m": module}):
        cache: dict[str, torch.Tensor] = {}
        result = module(torch.randn(2, 64), cache=cache)
        assert sorted(cache) == ["0", "1", "2"]
        assert cache["2"] is result


def test_regionally_compiled_blocks_stream_without_compiling_again(tmp_path: Path) -> None:
    family = TINY_MODELS["flux"]
    module, resident = family.build(), family.build()
    engine = Engine(cpu_device(), _budget(module, 0.5))
    with _hosted(engine, tmp_path, {"flux": module}):
        for model in (module, resident):
            for name in ("transformer_blocks", "single_transformer_blocks"):
                for block in model.get_submodule(name).children():
                    block.compile(backend="eager")
        expected = family.run(resident, family.example_inputs())
        for _ in range(3):
            assert torch.equal(family.run(module, family.example_inputs()), expected)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(9):
            assert torch.equal(family.run(module, family.example_inputs()), expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_case_3_a_weight_tied_between_blocks_is_one_weight(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.blocks[2].weight = self.blocks[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    torch.manual_seed(0)
    module = Tied().requires_grad_(False)
    x = torch.randn(2, 32)
    with torch.no_grad():
        expected = module(x)
        device = simulated_device()
        engine = Engine(device, _budget(module, 0.8))
        with _hosted(engine, tmp_path, {"m": module}, LEAVES, in_memory=True), device.watched():
            for _ in range(10):
                assert torch.equal(module(x), expected)
    assert device.hazards == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sequence", ["ddd", "dtd", "tdt", "ete", "etd"])
def test_case_50_encode_decode_and_tiling_in_any_order_are_exact(
    sequence: str, device: str, tmp_path: Path
) -> None:
    module: Any = TINY_MODELS["vae"].build()
    resident: Any = TINY_MODELS["vae"].build()
    image, latent = torch.randn(1, 3, 64, 64), torch.randn(1, 4, 32, 32)

    def call(model: Any, what: str) -> torch.Tensor:
        model.use_tiling = what == "t"
        with torch.no_grad():
            if what == "e":
                mean: torch.Tensor = model.encode(image).latent_dist.mean
                return mean
            decoded: torch.Tensor = model.decode(latent).sample
            return decoded

    accelerator = DEVICES[device]()
    engine = Engine(accelerator, _budget(module, 0.5))
    with _hosted(engine, tmp_path, {"vae": module}, in_memory=accelerator.has_dma):
        for _ in range(3):
            for what in sequence:
                assert torch.equal(call(module, what), call(resident, what))
            engine.settle()
