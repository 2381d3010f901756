"""A run that is put aside at any border goes on with its own numbers, whatever ran meanwhile."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hosting.hosting_help import SEED, Drawn, call_arguments, draw, host, new_device_host
from hosting.hosting_help import plain_script as plain
from offload.rig import simulated_device
from torch import nn

from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.running.arguments import prepare_call
from offloadd.hosting.running.aside import JobAside
from offloadd.hosting.running.global_state import ModuleSettings, Randomness, seed_all
from offloadd.hosting.running.job_tensors import MovedAside, storages_of, tensors_of

CPU = torch.device("cpu")


def draw_aside(
    model: HostedModel, between: Callable[[JobAside], None], steps: int = 4, **changes: Any
) -> Drawn:
    """Draw, and do something at each border while the run is put aside."""

    def at_root(aside: JobAside) -> None:
        assert aside.leave() is not None
        between(aside)
        aside.come_back()

    description = model.description
    arguments = call_arguments(description.files.directory, num_inference_steps=steps, **changes)
    call = prepare_call(arguments, description.parameters, SEED, model.device, description.dtype)
    images: Drawn = model.run(call, lambda *_: None, lambda: None, at_root)["images"]
    return images


def test_tensors_that_moved_to_host_memory_come_back_to_all_their_views(
    sd_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = host(sd_directory)
    monkeypatch.setattr(type(model._host), "has_room_for_parked", lambda self, more_bytes: False)
    moved: list[int] = []

    def between(aside: JobAside) -> None:
        assert aside._moved is not None
        moved.append(aside._moved.size_bytes)
        draw(model, SEED + 1)

    # The generators' noise and the guidance are views and sums of what was moved.
    images = draw_aside(model, between, eta=0.5)
    np.testing.assert_array_equal(images, plain(sd_directory, num_inference_steps=4, eta=0.5))
    assert len(moved) >= 5
    assert min(moved[2:]) > 2 * 16 * 24 * 4
    assert model._host.parked_bytes == 0
    model.unload()


@pytest.mark.parametrize("offload", ["stream", "model", "sequential"])
def test_weights_give_way_to_another_model_and_come_back(
    sd_directory: Path, flux_directory: Path, offload: str
) -> None:
    device = simulated_device()
    on = new_device_host(device)
    first = host(sd_directory, on=on, offload=offload)
    second = host(flux_directory, on=on, offload=offload)
    with device.watched():
        images = draw_aside(first, lambda aside: on.engine.empty())
        np.testing.assert_array_equal(images, plain(sd_directory, num_inference_steps=4))

        def draw_first(aside: JobAside) -> None:
            draw(first)

        images = draw_aside(second, draw_first)
        np.testing.assert_array_equal(images, plain(flux_directory, num_inference_steps=4))
    assert device.hazards == []
    first.unload()
    second.unload()


def test_case_29_memory_that_another_program_took_is_planned_without(sd_directory: Path) -> None:
    device = simulated_device()
    on = new_device_host(device)
    model = host(sd_directory, on=on, offload="stream")
    before = on.engine.stats()
    taken = device.allocate(before.budget_bytes // 2)
    on.engine.empty()
    on.plan_smaller(needed_bytes=1 << 20)
    after = on.engine.stats()
    assert after.reserve_bytes == before.reserve_bytes + (1 << 20)
    assert after.budget_bytes <= before.budget_bytes - taken.nbytes
    with device.watched():
        np.testing.assert_array_equal(draw(model), plain(sd_directory))
    on.plan_smaller(needed_bytes=1 << 40)
    assert on.engine.stats().reserve_bytes >= after.reserve_bytes
    np.testing.assert_array_equal(draw(model), plain(sd_directory))
    del taken
    model.unload()


def test_a_run_that_is_over_leaves_nothing_for_the_collector(sd_directory: Path) -> None:
    model, asides = host(sd_directory), []

    def at_root(aside: JobAside) -> None:
        asides.append(weakref.ref(aside))

    arguments = call_arguments(sd_directory)
    description = model.description
    call = prepare_call(arguments, description.parameters, SEED, model.device, description.dtype)
    gc.collect()
    gc.disable()
    try:
        model.run(call, lambda *_: None, lambda: None, at_root)
        assert {aside() for aside in asides} == {None}
    finally:
        gc.enable()
    model.unload()


def test_random_numbers_without_a_generator_are_the_jobs_own() -> None:
    def numbers() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    seed_all(5)
    undisturbed = [numbers() for _ in range(3)]
    seed_all(5)
    seen = [numbers()]
    own = Randomness.now(CPU)
    seed_all(99)
    numbers()
    own.restore(CPU)
    seen += [numbers(), numbers()]
    assert seen == undisturbed


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = SimpleNamespace(kind="plain")


class Adapted(nn.Module):
    """What a layer of peft holds of its adapters' settings."""

    def __init__(self) -> None:
        super().__init__()
        self._active_adapter = ["style"]
        self._disable_adapters = False
        self.scaling = {"style": 1.0}


def test_settings_of_modules_are_those_of_whose_turn_it_is() -> None:
    attention, adapted = Attention(), Adapted()
    root = nn.Sequential(attention, adapted)
    plain_processor = attention.processor
    before = ModuleSettings.of([root])
    attention.processor = SimpleNamespace(kind="own")
    adapted.scaling["style"] = 0.3
    adapted._disable_adapters = True
    own = ModuleSettings.of([root])
    before.restore()
    assert attention.processor is plain_processor
    assert (adapted.scaling, adapted._disable_adapters) == ({"style": 1.0}, False)
    adapted.scaling["came since"] = 2.0
    own.restore()
    assert attention.processor.kind == "own"
    assert adapted.scaling == {"style": 0.3, "came since": 2.0}
    assert adapted._disable_adapters


def test_a_model_with_a_cache_between_steps_keeps_its_turn(sd_directory: Path) -> None:
    model = host(sd_directory)
    model._pipeline.unet._diffusers_hook = SimpleNamespace(hooks={"cache": object()})
    answers = []

    def at_root(aside: JobAside) -> None:
        answers.append(aside.leave())

    description = model.description
    arguments = call_arguments(sd_directory)
    call = prepare_call(arguments, description.parameters, SEED, model.device, description.dtype)
    model.run(call, lambda *_: None, lambda: None, at_root)
    assert answers
    assert set(answers) == {None}
    del model._pipeline.unet._diffusers_hook
    model.unload()


def test_the_tensors_of_a_call_are_found_wherever_frames_hold_them() -> None:
    seen: list[int] = []

    def inner(plain: torch.Tensor, inside: dict[str, Any], outermost: FrameType) -> None:
        view = plain[2:]
        steps = (torch.full((1,), 4.0) for _ in range(2))
        next(steps)
        found = list(tensors_of(sys._getframe(), outermost))
        seen.extend(id(one) for one in found)
        assert {id(plain), id(view), id(inside["list"][0])} <= set(seen)

    def outer() -> None:
        kept = torch.ones(3)
        inner(torch.zeros(8), {"list": [torch.ones(2)]}, sys._getframe())
        assert id(kept) in seen

    outer()


def test_looking_at_frames_keeps_no_tensor_alive() -> None:
    def call() -> None:
        latents = torch.ones(4)
        gone = weakref.ref(latents)
        list(tensors_of(sys._getframe(), sys._getframe()))
        latents = torch.zeros(4)
        gc.collect()
        assert gone() is None
        assert latents.sum() == 0

    call()


def test_a_storage_is_moved_once_and_parameters_are_not() -> None:
    base = torch.arange(6.0)
    weight = nn.Parameter(torch.ones(3))
    storages = storages_of([base, base[1:3], base.view(2, 3), weight, weight.data[:0]], CPU)
    assert len(storages) == 1 or weight.data_ptr() in {one.data_ptr() for one in storages[1:]}
    view = base[3:]
    moved = MovedAside(storages[:1])
    assert storages[0].nbytes() == 0
    moved.move_back()
    assert view.tolist() == [3.0, 4.0, 5.0]
