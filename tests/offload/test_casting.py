"""Weights stored in fp8: the same numbers as diffusers' layerwise casting, within the budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload.cast_sources import cast_source
from offload.rig import cpu_device, simulated_device
from offload.tiny_models import TINY_MODELS
from torch import nn

from offload_protocol.errors import InvalidRequest, ModelLoadFailed, OutOfMemory
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.engine import Engine
from offloadd.offload.grouping.groups import GroupOptions, module_layout
from offloadd.offload.weights.casting import Casting

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = GroupOptions("block_level", small_limit_bytes=0)
LEAVES = GroupOptions("leaf_level", small_limit_bytes=2048)
PLACES: dict[str, tuple[Callable[[], Accelerator], bool]] = {
    "disk": (cpu_device, False),
    "in_place": (cpu_device, True),
    "link": (simulated_device, True),
}
"""The device, and whether the source is in host memory."""


def _build(name: str) -> nn.Module:
    return TINY_MODELS[name].build(dtype=torch.bfloat16)


def _run(name: str, module: nn.Module, seed: int = 0) -> torch.Tensor:
    family = TINY_MODELS[name]
    return family.run(module, family.example_inputs(seed, torch.bfloat16))


@functools.cache
def _by_diffusers(name: str, storage: torch.dtype) -> torch.Tensor:
    module: Any = _build(name)
    module.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.bfloat16)
    return _run(name, module)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("storage", "options"), [(E4M3, BLOCKS), (E5M2, LEAVES)])
@pytest.mark.parametrize("name", ["flux", "sd_unet"])
def test_case_53_fp8_weights_compute_what_diffusers_computes(
    name: str, storage: torch.dtype, options: GroupOptions, place: str, tmp_path: Path
) -> None:
    expected = _by_diffusers(name, storage)
    assert not torch.equal(expected, _run(name, _build(name)))
    module, casting = _build(name), Casting(storage)
    make_device, in_memory = PLACES[place]
    plain_bytes = module_layout(module).size_bytes
    with cast_source(module, casting, tmp_path / "p.safetensors", in_memory=in_memory) as source:
        assert source.layout.size_bytes < 0.8 * plain_bytes
        device = make_device()
        engine = Engine(device, int(0.8 * plain_bytes))
        engine.attach(name, module, source, options, casting)
        for _ in range(10):
            assert torch.equal(_run(name, module), expected)
            stats = engine.stats()
            assert stats.resident_bytes + stats.ring_bytes <= engine.budget_bytes
        assert engine.stats().components[0].stage == (
            "settled" if place != "in_place" else "first_pass"
        )
        engine.close()
        assert engine.stats().resident_bytes == 0


def test_cast_steps_race_with_nothing_and_allocate_nothing(tmp_path: Path) -> None:
    module, casting = _build("flux"), Casting(E4M3)
    expected = _by_diffusers("flux", E4M3)
    device = simulated_device(seed=5)
    with cast_source(module, casting, tmp_path / "p", in_memory=True) as source:
        engine = Engine(device, int(0.8 * source.layout.size_bytes))
        engine.attach("flux", module, source, BLOCKS, casting)
        with device.watched():
            for _ in range(10):
                assert torch.equal(_run("flux", module), expected)
            allocations, moved = device.allocations, engine.counters.moved_bytes
            for _ in range(3):
                assert torch.equal(_run("flux", module), expected)
        plan = engine.plan("flux")
        assert plan is not None
        assert plan.resident
        assert device.allocations == allocations
        assert engine.counters.moved_bytes - moved == 3 * plan.streamed_bytes_per_step
        assert device.hazards == []
        engine.close()


@pytest.mark.parametrize("place", ["disk", "link"])
def test_the_smallest_budget_that_is_named_includes_the_memory_to_cast_into(
    place: str, tmp_path: Path
) -> None:
    module, casting = _build("flux"), Casting(E4M3)
    make_device, in_memory = PLACES[place]
    with cast_source(module, casting, tmp_path / "p", in_memory=in_memory) as source:
        with pytest.raises(OutOfMemory) as refused:
            Engine(make_device(), 1000).attach("flux", module, source, BLOCKS, casting)
        minimum = refused.value.details["minimum_budget_bytes"]
        largest_cast = max(
            sum(slot.spec.size_bytes for slot in unit.tensors) for unit in source.layout.units
        )
        assert minimum > 3 * largest_cast
        engine = Engine(make_device(), minimum)
        engine.attach("flux", module, source, BLOCKS, casting)
        for _ in range(3):
            assert torch.equal(_run("flux", module), _by_diffusers("flux", E4M3))
            assert engine.stats().resident_bytes + engine.stats().ring_bytes <= minimum
        engine.close()


def test_cast_weights_answer_the_dtype_that_is_computed_in(tmp_path: Path) -> None:
    module, casting = _build("flux"), Casting(E4M3)
    with cast_source(module, casting, tmp_path / "p", in_memory=True) as source:
        engine = Engine(simulated_device(), 10 * source.layout.size_bytes)
        engine.attach("flux", module, source, BLOCKS, casting)
        _run("flux", module)
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
        assert str(module.dtype) == "torch.bfloat16"
        engine.close()


def test_patterns_and_classes_skip_what_they_skip_in_diffusers(tmp_path: Path) -> None:
    reference: Any = _build("sd_unet")
    reference.enable_layerwise_casting(
        storage_dtype=E4M3,
        compute_dtype=torch.bfloat16,
        skip_modules_pattern=("attn1", "time"),
        skip_modules_classes=(nn.Conv2d,),
    )
    casting = Casting(E4M3, ("attn1", "time"), (nn.Conv2d,))
    module = _build("sd_unet")
    cast_names = {
        name
        for name, slot in module_layout(module, casting).slots().items()
        if slot.spec.dtype == "F8_E4M3"
    }
    in_diffusers = {name for name, p in reference.named_parameters() if p.dtype == E4M3}
    assert cast_names == in_diffusers
    with cast_source(module, casting, tmp_path / "p", in_memory=True) as source:
        engine = Engine(simulated_device(), 10 * source.layout.size_bytes)
        engine.attach("unet", module, source, LEAVES, casting)
        assert torch.equal(_run("sd_unet", module), _run("sd_unet", reference))
        engine.close()


@pytest.mark.parametrize(
    "name", ["sd3", "pixart", "sana", "wan", "ltx", "cogvideox", "vae", "prior"]
)
def test_the_same_weights_are_cast_as_in_diffusers(name: str) -> None:
    reference: Any = _build(name)
    reference.enable_layerwise_casting(storage_dtype=E5M2, compute_dtype=torch.bfloat16)
    slots = module_layout(_build(name), Casting(E5M2)).slots()
    dtypes = dict(reference.named_parameters())
    assert {n for n, slot in slots.items() if slot.spec.dtype == "F8_E5M2"} == {
        n for n in slots if dtypes[n].dtype == E5M2
    }


class _Filtered(nn.Linear):
    kernel: torch.Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("kernel", torch.linspace(0.1, 0.9, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.kernel


def test_buffers_of_cast_layers_are_rounded_as_diffusers_rounds_them(tmp_path: Path) -> None:
    from diffusers.hooks import apply_layerwise_casting

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(_Filtered(), _Filtered()).requires_grad_(False)

    reference, module, casting = build(), build(), Casting(E4M3)
    apply_layerwise_casting(reference, E4M3, torch.float32)
    x = torch.linspace(-1, 1, 8)
    with cast_source(module, casting, tmp_path / "p", in_memory=True) as source:
        engine = Engine(simulated_device(), 10 * source.layout.size_bytes)
        engine.attach("m", module, source, LEAVES, casting)
        with torch.no_grad():
            assert torch.equal(module(x), reference(x))
        engine.close()


def test_an_unknown_storage_dtype_and_a_broken_pattern_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="float16"):
        Casting(torch.float16)
    with pytest.raises(InvalidRequest, match="regular expression"):
        Casting(E4M3, ("(",))


def test_a_source_in_another_dtype_than_the_casting_is_refused(tmp_path: Path) -> None:
    module, casting = _build("flux"), Casting(E4M3)
    with cast_source(module, casting, tmp_path / "p", in_memory=True) as source:
        engine = Engine(simulated_device(), 10 * source.layout.size_bytes)
        with pytest.raises(ModelLoadFailed):
            engine.attach("flux", module, source, BLOCKS)
        assert torch.equal(_run("flux", module), _run("flux", _build("flux")))
