"""A hosted model draws the same picture whatever happened before, and unloading means gone."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hosting.hosting_help import Drawn, draw, host, plain_script

from offload_protocol.errors import Cancelled
from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.loading.loading import modules

MODES: dict[str, Any] = {
    "none": "none",
    "model": "model",
    "sequential": "sequential",
    "leaves": {"mode": "group", "offload_type": "leaf_level"},
}


@pytest.fixture(params=MODES)
def model(request: pytest.FixtureRequest, sd_directory: Path) -> HostedModel:
    return host(sd_directory, offload=MODES[request.param])


@pytest.fixture
def reference(sd_directory: Path, references: dict[Path, Drawn]) -> Drawn:
    return references[sd_directory]


class AtBorder:
    """Raises at the border with this number, counted from 1."""

    def __init__(self, number: int, error: Exception) -> None:
        self.left = number
        self.error = error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def count_borders(model: HostedModel) -> int:
    seen: list[None] = []
    draw(model, at_border=lambda: seen.append(None))
    return len(seen)


def test_case_30_a_cancel_at_any_border_leaves_the_next_picture_right(
    model: HostedModel, reference: Drawn
) -> None:
    total = count_borders(model)
    assert total > 10
    for number in (1, 2, 3, total // 2, total):
        with pytest.raises(Cancelled):
            draw(model, at_border=AtBorder(number, Cancelled("stop")))
        np.testing.assert_array_equal(draw(model), reference)


def test_case_28_running_out_of_memory_inside_a_layer_leaves_the_next_picture_right(
    model: HostedModel, reference: Drawn
) -> None:
    unet = modules(model._pipeline)["unet"]
    deep = [one for one in unet.modules() if isinstance(one, torch.nn.Conv2d)][-1]
    fail = AtBorder(2, torch.OutOfMemoryError("Tried to allocate 2.00 GiB"))
    handle = deep.register_forward_hook(lambda *_: fail())
    with pytest.raises(torch.OutOfMemoryError):
        draw(model)
    handle.remove()
    assert model.resident_bytes in (0, sum(model.description.component_bytes.values()))
    np.testing.assert_array_equal(draw(model), reference)


def test_case_30_a_failure_at_a_step_leaves_the_next_picture_right(
    model: HostedModel, reference: Drawn
) -> None:
    def fail(step: int, steps: int) -> None:
        if step == 2:
            raise RuntimeError("failed at step 2")

    with pytest.raises(RuntimeError, match="step 2"):
        draw(model, on_step=fail)
    np.testing.assert_array_equal(draw(model), reference)


def test_case_47_a_job_with_other_steps_does_not_show_in_the_next(
    model: HostedModel, reference: Drawn
) -> None:
    draw(model, num_inference_steps=7, guidance_scale=2.0)
    np.testing.assert_array_equal(draw(model), reference)


def test_case_46_each_picture_of_a_batch_can_be_drawn_alone(sd_directory: Path) -> None:
    model = host(sd_directory)
    batch = draw(model, 5, prompt=["a cat", "a dog"], num_images_per_prompt=2)
    assert batch.shape[0] == 4
    for index, prompt in enumerate(["a cat", "a cat", "a dog", "a dog"]):
        alone = draw(model, 5 + index, prompt=prompt)
        # Kernels choose their order of summing by the batch's size, so that bits may differ.
        np.testing.assert_allclose(batch[index], alone[0], atol=1e-4)
    assert np.abs(batch[0] - batch[1]).max() > 1e-2


def test_a_batch_of_one_is_the_picture_of_a_plain_script(sd_directory: Path) -> None:
    drawn = draw(host(sd_directory), 9, prompt=["a dog"])
    np.testing.assert_array_equal(drawn, plain_script(sd_directory, 9, prompt="a dog"))


def test_global_randomness_is_left_as_it_was(sd_directory: Path) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    draw(host(sd_directory))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert random.getstate() == before[2]


def test_progress_counts_every_step(sd_directory: Path) -> None:
    steps: list[tuple[int, int]] = []
    draw(host(sd_directory), on_step=lambda step, total: steps.append((step, total)))
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_case_20_unloading_means_that_every_module_is_gone(
    sd_directory: Path, level: str, tmp_path: Path
) -> None:
    gc.collect()
    for path in (None, str(tmp_path)):
        offload = {"mode": "group", "offload_type": level, "offload_to_disk_path": path}
        model = host(sd_directory, offload=offload)
        draw(model)
        alive = [weakref.ref(one) for one in modules(model._pipeline)["unet"].modules()]
        assert model.unload() == []
        assert [one for one in alive if one() is not None] == []
    assert list(tmp_path.iterdir()) == []


def test_case_20_unloading_names_what_something_still_holds(sd_directory: Path) -> None:
    model = host(sd_directory)
    holder = modules(model._pipeline)["vae"]
    assert model.unload() == ["vae"]
    del holder


@pytest.mark.parametrize("mode", MODES)
def test_case_19_loading_and_unloading_again_and_again_does_not_grow(
    sd_directory: Path, mode: str
) -> None:
    gc.collect()

    def live_tensors() -> int:
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    def round_trip() -> int:
        model = host(sd_directory, offload=MODES[mode])
        draw(model)
        assert model.unload() == []
        return live_tensors()

    assert len({round_trip() for _ in range(3)}) == 1


def test_case_15_weights_do_not_change_with_their_file(
    sd_directory: Path, references: dict[Path, Drawn], tmp_path: Path
) -> None:
    import shutil

    copied = tmp_path / "copy"
    shutil.copytree(sd_directory, copied)
    model = host(copied)
    for weights in copied.rglob("*.safetensors"):
        with weights.open("r+b") as file:
            file.seek(-1000, 2)
            file.write(b"\x7f" * 1000)
            file.truncate(1024)
    np.testing.assert_array_equal(draw(model), references[sd_directory])
