"""Adapters on a streamed model: as on a plain one, and no base weight moves for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.utils.peft_utils import delete_adapter_layers, set_adapter_layers
from offload.cast_sources import cast_source
from offload.rig import cpu_device, disk_source, host_source, simulated_device
from offload.tiny_adapters import StateDict, lora
from offload.tiny_models import TINY_MODELS
from safetensors.torch import save_file
from torch import nn

from offload_protocol.errors import InvalidRequest, OutOfMemory, StorageFailed
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.accelerator.simulated import SimulatedAccelerator
from offloadd.offload.adapters.adapters import check_pairs
from offloadd.offload.engine import Engine
from offloadd.offload.engine_stats import ComponentStats
from offloadd.offload.grouping.groups import GroupOptions, module_layout
from offloadd.offload.weights.casting import Casting
from offloadd.store.source import WeightSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter bad was active:UserWarning"),
]
"""peft warns of every adapter but the first, and when one goes."""

BLOCKS = GroupOptions("block_level", small_limit_bytes=0)
LEAVES = GroupOptions("leaf_level", small_limit_bytes=2048)
OPTIONS = {"blocks": BLOCKS, "leaves": LEAVES}
PLACES: dict[str, tuple[Callable[[], Accelerator], bool]] = {
    "disk": (cpu_device, False),
    "in_place": (cpu_device, True),
    "link": (simulated_device, True),
}
FAMILIES = ("flux", "sd_unet")
CONVOLUTIONS = ("to_q", "to_out", "conv1", "proj_in")


def _run(name: str, module: nn.Module, seed: int = 0) -> torch.Tensor:
    return TINY_MODELS[name].run(module, TINY_MODELS[name].example_inputs(seed))


def _stats(engine: Engine) -> ComponentStats:
    return engine.stats().components[0]


@contextmanager
def _hosted(
    name: str,
    directory: Path,
    place: str = "link",
    options: GroupOptions = BLOCKS,
    share: float = 0.6,
) -> Iterator[tuple[Engine, Any]]:
    """An engine with one streamed tiny model that has run until its plan settled."""
    module = TINY_MODELS[name].build()
    make_device, in_memory = PLACES[place]
    with ExitStack() as files:
        path = directory / "w.safetensors"
        source: WeightSource
        if in_memory:
            source = files.enter_context(host_source(module, path))
        else:
            source = files.enter_context(disk_source(module, path))
        engine = Engine(make_device(), int(module_layout(module).size_bytes * share))
        engine.attach(name, module, source, options)
        for _ in range(10):
            _run(name, module)
        yield engine, module
        engine.close()


class _Both:
    """A streamed model and a plain one that go through the same changes."""

    def __init__(self, name: str, engine: Engine, streamed: Any) -> None:
        self.name = name
        self.engine = engine
        self.streamed = streamed
        self.plain: Any = TINY_MODELS[name].build()

    def change(self, what: Callable[[Any], object]) -> None:
        moved = self.engine.counters.moved_bytes
        with self.engine.changing_adapters(self.name):
            what(self.streamed)
        assert self.engine.counters.moved_bytes == moved
        what(self.plain)

    def agree(self) -> torch.Tensor:
        expected = _run(self.name, self.plain)
        for _ in range(3):
            assert torch.equal(_run(self.name, self.streamed), expected)
            stats = self.engine.stats()
            assert stats.resident_bytes + stats.ring_bytes <= stats.budget_bytes
        return expected


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_case_8_and_9_load_switch_and_delete_equal_the_same_on_a_plain_model(
    name: str, options: str, place: str, tmp_path: Path
) -> None:
    with _hosted(name, tmp_path, place, OPTIONS[options]) as (engine, module):
        both = _Both(name, engine, module)
        first = lora(both.plain, seed=1)
        second = lora(both.plain, CONVOLUTIONS, rank=2, seed=2)
        outputs = [both.agree()]
        both.change(lambda m: m.load_lora_adapter(dict(first), prefix=None, adapter_name="a"))
        outputs.append(both.agree())
        assert _stats(engine).adapter_bytes >= sum(weight.nbytes for weight in first.values())
        both.change(lambda m: m.load_lora_adapter(dict(second), prefix=None, adapter_name="b"))
        both.change(lambda m: m.set_adapters(["a", "b"], [0.5, 2.0]))
        outputs.append(both.agree())
        both.change(lambda m: m.disable_lora())
        assert torch.equal(both.agree(), outputs[0])
        both.change(lambda m: m.enable_lora())
        both.change(lambda m: m.delete_adapters("a"))
        outputs.append(both.agree())
        both.change(lambda m: m.delete_adapters("b"))
        assert torch.equal(both.agree(), outputs[0])
        both.change(lambda m: m.load_lora_adapter(dict(first), prefix=None, adapter_name="c"))
        assert torch.equal(both.agree(), outputs[1])
        both.change(lambda m: m.unload_lora())
        assert torch.equal(both.agree(), outputs[0])
        assert _stats(engine).adapter_bytes == 0
        assert len({tuple(output.flatten().tolist()) for output in outputs}) == len(outputs)


def test_with_room_for_it_an_adapter_changes_neither_plan_nor_traffic(tmp_path: Path) -> None:
    with _hosted("flux", tmp_path, share=3.0) as (engine, module):
        both = _Both("flux", engine, module)
        plan, misses, moved = engine.plan("flux"), engine.counters.misses, engine.counters
        before = moved.moved_bytes
        weights = lora(both.plain)
        both.change(lambda m: m.load_lora_adapter(dict(weights), prefix=None, adapter_name="a"))
        both.agree()
        assert engine.plan("flux") is plan
        assert (engine.counters.misses, engine.counters.moved_bytes) == (misses, before)


def test_streaming_moves_the_same_bytes_a_step_with_an_adapter_as_its_plan_says(
    tmp_path: Path,
) -> None:
    with _hosted("flux", tmp_path, share=0.5) as (engine, module):
        both = _Both("flux", engine, module)
        weights = lora(both.plain)
        both.change(lambda m: m.load_lora_adapter(dict(weights), prefix=None, adapter_name="a"))
        for _ in range(3):
            _run("flux", module)
        moved, reads = engine.counters.moved_bytes, engine.counters.misses
        for _ in range(4):
            _run("flux", module)
        plan = engine.plan("flux")
        assert plan is not None
        assert plan.streamed_bytes_per_step > 0
        assert engine.counters.moved_bytes - moved == 4 * plan.streamed_bytes_per_step
        assert engine.counters.misses == reads


def test_an_adapter_loaded_before_the_first_pass_is_right(tmp_path: Path) -> None:
    module: Any = TINY_MODELS["sd_unet"].build()
    with host_source(module, tmp_path / "w") as source:
        engine = Engine(simulated_device(), int(0.5 * source.layout.size_bytes))
        engine.attach("sd_unet", module, source, LEAVES)
        both = _Both("sd_unet", engine, module)
        weights = lora(both.plain, CONVOLUTIONS)
        both.change(lambda m: m.load_lora_adapter(dict(weights), prefix=None, adapter_name="a"))
        for _ in range(4):
            both.agree()
        engine.close()


def test_case_10_a_text_encoder_adapter_colours_only_what_asks_for_it(tmp_path: Path) -> None:
    with _hosted("clip", tmp_path, options=LEAVES) as (engine, module):
        both = _Both("clip", engine, module)
        fresh = both.agree()
        state = {
            f"base_model.model.{key}": value
            for key, value in lora(both.plain, ("q_proj", "out_proj")).items()
        }

        def load(model: Any) -> None:
            from peft import LoraConfig

            config = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "out_proj"])
            model.load_adapter(adapter_name="a", adapter_state_dict=dict(state), peft_config=config)

        def switch(enabled: bool) -> None:
            both.change(lambda m: set_adapter_layers(m, enabled=enabled))

        for _ in range(2):
            both.change(load)
            assert not torch.equal(both.agree(), fresh)
            switch(False)
            assert torch.equal(both.agree(), fresh)
            switch(True)
            both.change(lambda m: delete_adapter_layers(m, "a"))
            assert torch.equal(both.agree(), fresh)


def _wrong_shape(state: StateDict) -> StateDict:
    key = next(key for key in state if "lora_B" in key)
    return {**state, key: torch.zeros(state[key].shape[0] + 3, state[key].shape[1])}


def _another_models(state: StateDict) -> StateDict:
    return {key.replace("transformer_blocks", "layers"): value for key, value in state.items()}


@pytest.mark.parametrize("other_first", [False, True])
@pytest.mark.parametrize("spoil", [_wrong_shape, _another_models])
def test_case_11_an_adapter_that_does_not_fit_is_refused_and_leaves_no_trace(
    spoil: Callable[[StateDict], StateDict], other_first: bool, tmp_path: Path
) -> None:
    with _hosted("flux", tmp_path) as (engine, module):
        both = _Both("flux", engine, module)
        good = lora(both.plain, seed=3)
        if other_first:
            both.change(lambda m: m.load_lora_adapter(dict(good), prefix=None, adapter_name="a"))
        expected = both.agree()
        kinds = [type(child) for child in module.modules()]
        bytes_before = _stats(engine).adapter_bytes
        bad = spoil(lora(TINY_MODELS["flux"].build(), seed=4))
        with pytest.raises(InvalidRequest), engine.changing_adapters("flux"):
            module.load_lora_adapter(dict(bad), prefix=None, adapter_name="bad")
        assert [type(child) for child in module.modules()] == kinds
        assert _stats(engine).adapter_bytes == bytes_before
        assert torch.equal(both.agree(), expected)
        if not other_first:
            both.change(lambda m: m.load_lora_adapter(dict(good), prefix=None, adapter_name="bad"))
            assert not torch.equal(both.agree(), expected)


def test_case_11_an_adapter_file_that_lacks_a_matrix_is_refused_by_name() -> None:
    whole = {"a.lora_A.weight", "a.lora_B.weight", "a.lora_B.bias", "a.alpha", "b.lora.up.weight"}
    check_pairs({*whole, "b.lora.down.weight"})
    with pytest.raises(InvalidRequest, match=r"b\.lora\.up"):
        check_pairs(whole)
    with pytest.raises(InvalidRequest, match=r"a\.lora_B"):
        check_pairs({"a.lora_B.weight"})


def test_case_11_a_truncated_adapter_file_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    with _hosted("flux", tmp_path) as (engine, module):
        both = _Both("flux", engine, module)
        expected = both.agree()
        path = tmp_path / "adapter.safetensors"
        save_file(lora(both.plain), path)
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(InvalidRequest, match="adapter"), engine.changing_adapters("flux"):
            module.load_lora_adapter(
                str(tmp_path), weight_name=path.name, prefix=None, adapter_name="a"
            )
        assert torch.equal(both.agree(), expected)


def test_an_adapter_for_which_there_is_no_room_is_refused_with_the_plan(tmp_path: Path) -> None:
    with _hosted("flux", tmp_path, share=0.35) as (engine, module):
        both = _Both("flux", engine, module)
        expected = both.agree()
        large = lora(both.plain, rank=400)
        with pytest.raises(OutOfMemory), engine.changing_adapters("flux"):
            module.load_lora_adapter(dict(large), prefix=None, adapter_name="large")
        assert torch.equal(both.agree(), expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_case_9_fused_equals_plain_fused_and_unfused_equals_never_fused(
    name: str, options: str, place: str, tmp_path: Path
) -> None:
    with _hosted(name, tmp_path, place, OPTIONS[options]) as (engine, module):
        both = _Both(name, engine, module)
        never = both.agree()
        state = lora(both.plain, ("to_q", "to_out", "conv1", "linear_1"))
        both.change(lambda m: m.load_lora_adapter(dict(state), prefix=None, adapter_name="a"))
        beside = both.agree()
        engine.fuse(name, scale=0.7)
        both.plain.fuse_lora(lora_scale=0.7)
        assert not torch.equal(both.agree(), beside)
        assert _stats(engine).derived_bytes > 0
        engine.unfuse(name)
        for _ in range(3):
            assert torch.equal(_run(name, module), beside)
        assert _stats(engine).derived_bytes == 0
        with engine.changing_adapters(name):
            module.unload_lora()
        for _ in range(3):
            assert torch.equal(_run(name, module), never)


class _Failing:
    """A source of which, once told to, every read from the given one on fails."""

    def __init__(self, base: WeightSource) -> None:
        self._base = base
        self.reads_left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def read(self, start_bytes: int, stop_bytes: int, into: memoryview) -> Future[int]:
        if self.reads_left is not None:
            self.reads_left -= 1
            if self.reads_left < 0:
                failed: Future[int] = Future()
                failed.set_exception(StorageFailed("the disk is gone", hint="attach it again"))
                return failed
        return self._base.read(start_bytes, stop_bytes, into)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_read_that_fails_at_any_point_of_fusing_or_unfusing_leaves_the_model_right(
    options: str, tmp_path: Path
) -> None:
    module: Any = TINY_MODELS["flux"].build()
    plain: Any = TINY_MODELS["flux"].build()
    with disk_source(module, tmp_path / "w.safetensors") as on_disk:
        source = _Failing(on_disk)
        engine = Engine(cpu_device(), int(0.6 * source.layout.size_bytes))
        engine.attach("flux", module, source, OPTIONS[options])
        both = _Both("flux", engine, module)
        state = lora(plain, ("to_q", "to_out", "linear_1"))
        both.change(lambda m: m.load_lora_adapter(dict(state), prefix=None, adapter_name="a"))
        beside = both.agree()
        both.plain.fuse_lora()
        fused = _run("flux", both.plain)

        def until_it_works(what: Callable[[], None], before: torch.Tensor) -> int:
            """Try with one more good read each time; says how many reads it takes."""
            for reads in range(200):
                source.reads_left = reads
                try:
                    what()
                except StorageFailed:
                    source.reads_left = None
                    assert torch.equal(_run("flux", module), before)
                else:
                    source.reads_left = None
                    return reads
            raise AssertionError("it never works")

        assert until_it_works(lambda: engine.fuse("flux"), beside) > 3
        assert torch.equal(_run("flux", module), fused)
        until_it_works(lambda: engine.unfuse("flux"), fused)
        assert torch.equal(_run("flux", module), beside)
        assert _stats(engine).derived_bytes == 0
        engine.close()


def test_a_second_fuse_a_change_while_fused_and_nothing_to_fuse_are_refused(
    tmp_path: Path,
) -> None:
    with _hosted("flux", tmp_path) as (engine, module):
        with pytest.raises(InvalidRequest, match="no adapter"):
            engine.fuse("flux")
        both = _Both("flux", engine, module)
        state = lora(both.plain)
        both.change(lambda m: m.load_lora_adapter(dict(state), prefix=None, adapter_name="a"))
        expected = both.agree()
        with pytest.raises(InvalidRequest, match="none of the adapters"):
            engine.fuse("flux", ["unknown"])
        assert torch.equal(both.agree(), expected)
        engine.fuse("flux", ["a"])
        with pytest.raises(InvalidRequest, match="fused already"):
            engine.fuse("flux")
        with pytest.raises(InvalidRequest, match="unfuse"), engine.changing_adapters("flux"):
            raise AssertionError("never entered")
        engine.unfuse("flux")
        assert torch.equal(both.agree(), expected)


def test_case_53_an_adapter_on_fp8_weights_equals_casting_after_loading_it(tmp_path: Path) -> None:
    family, casting = TINY_MODELS["flux"], Casting(torch.float8_e4m3fn)
    inputs = family.example_inputs(0, torch.bfloat16)
    reference: Any = family.build(dtype=torch.bfloat16)
    state = {key: value.bfloat16() for key, value in lora(reference).items()}
    reference.load_lora_adapter(dict(state), prefix=None, adapter_name="a")
    reference.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    module: Any = family.build(dtype=torch.bfloat16)
    with cast_source(module, casting, tmp_path / "p", in_memory=True) as source:
        engine = Engine(simulated_device(), source.layout.size_bytes)
        engine.attach("flux", module, source, BLOCKS, casting)
        family.run(module, inputs)
        with engine.changing_adapters("flux"):
            module.load_lora_adapter(dict(state), prefix=None, adapter_name="a")
        for _ in range(4):
            assert torch.equal(family.run(module, inputs), family.run(reference, inputs))
        with pytest.raises(InvalidRequest, match="F8_E4M3"):
            engine.fuse("flux")
        assert torch.equal(family.run(module, inputs), family.run(reference, inputs))
        engine.close()


def test_adapters_and_fused_weights_race_with_nothing(tmp_path: Path) -> None:
    module: Any = TINY_MODELS["flux"].build()
    device = simulated_device(seed=11)
    assert isinstance(device, SimulatedAccelerator)
    with host_source(module, tmp_path / "w") as source:
        engine = Engine(device, int(0.5 * source.layout.size_bytes))
        engine.attach("flux", module, source, BLOCKS)
        with device.watched():
            for _ in range(8):
                _run("flux", module)
            with engine.changing_adapters("flux"):
                module.load_lora_adapter(lora(module), prefix=None, adapter_name="a")
            engine.fuse("flux")
            for _ in range(3):
                _run("flux", module)
            engine.unfuse("flux")
            for _ in range(3):
                _run("flux", module)
            with engine.changing_adapters("flux"):
                module.unload_lora()
            _run("flux", module)
        assert device.hazards == []
        engine.close()


def test_adapters_outlive_the_engine_in_host_memory(tmp_path: Path) -> None:
    with _hosted("flux", tmp_path) as (engine, module):
        state = lora(module)
        with engine.changing_adapters("flux"):
            module.load_lora_adapter(dict(state), prefix=None, adapter_name="a")
        layer = module.get_submodule("transformer_blocks.0.attn.to_q.lora_A.a")
        engine.detach("flux")
        expected = state["transformer_blocks.0.attn.to_q.lora_A.weight"]
        assert torch.equal(layer.weight, expected)
        assert engine.stats().resident_bytes == 0
