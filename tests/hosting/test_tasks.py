"""A task chooses the pipeline that does it with a model's weights, or says what is missing."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, get_args

import diffusers
import numpy as np
import pytest
import torch
from hosting.families import picture
from hosting.hosting_help import SEED, Drawn, call_arguments, draw, host, new_device_host
from hosting.test_describe import described

from offload_protocol.errors import InvalidRequest, ModelLoadFailed
from offloadd.channel.specs import Task
from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.running.arguments import prepare_call
from offloadd.hosting.sources.tasks import class_for_task
from offloadd.offload.accelerator.simulated import Link, SimulatedAccelerator


@pytest.mark.parametrize(
    ("saved_as", "classes"),
    [
        (
            "StableDiffusionXLPipeline",
            {
                "text-to-image": "StableDiffusionXLPipeline",
                "image-to-image": "StableDiffusionXLImg2ImgPipeline",
                "inpainting": "StableDiffusionXLInpaintPipeline",
            },
        ),
        (
            "LTXImageToVideoPipeline",
            {"text-to-video": "LTXPipeline", "image-to-video": "LTXImageToVideoPipeline"},
        ),
        (
            "WanPipeline",
            {
                "text-to-video": "WanPipeline",
                "image-to-video": "WanImageToVideoPipeline",
                "video-to-video": "WanVideoToVideoPipeline",
            },
        ),
        ("PixArtSigmaPipeline", {}),
    ],
)
def test_classes_that_share_weights_are_found_by_their_names(
    saved_as: str, classes: dict[Task, str]
) -> None:
    for task in get_args(Task):
        if task in classes:
            assert class_for_task(saved_as, task) == classes[task]
        else:
            with pytest.raises(ModelLoadFailed, match=saved_as):
                class_for_task(saved_as, task)


def test_a_task_names_the_class_that_does_it_with_the_same_weights(sd_directory: Path) -> None:
    found = described(sd_directory, task="inpainting")
    assert found.files.class_name == "StableDiffusionInpaintPipeline"
    assert found.parameters["mask_image"]
    assert described(sd_directory, pipeline="StableDiffusionPAGPipeline").parameters["pag_scale"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"task": "text-to-video"}, "inpainting"),
        ({"pipeline": "StableDiffusionControlNetPipeline"}, "controlnet"),
    ],
)
def test_a_task_that_the_weights_cannot_do_is_refused_with_what_is_missing(
    sd_directory: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadFailed) as refused:
        described(sd_directory, **options)
    assert named in refused.value.message + refused.value.hint


def test_a_task_beside_a_pipeline_is_refused(sd_directory: Path) -> None:
    with pytest.raises(InvalidRequest, match="both"):
        described(sd_directory, task="inpainting", pipeline="StableDiffusionPAGPipeline")


def redrawing(directory: Path) -> dict[str, Any]:
    """The usual call for the other task, which takes its size from the picture."""
    arguments = call_arguments(directory, image=picture(), strength=1.0)
    del arguments["height"], arguments["width"]
    return arguments


def redrawn(directory: Path) -> Drawn:
    """What plain diffusers draws for the other task, with the components of the first pipeline."""
    first = diffusers.StableDiffusionPipeline.from_pretrained(directory)
    pipeline = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(first)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator("cpu").manual_seed(SEED)
    images: Drawn = pipeline(generator=noise, **redrawing(directory)).images
    return images


def draw_with(model: HostedModel, arguments: dict[str, Any]) -> Drawn:
    description = model.description
    call = prepare_call(arguments, description.parameters, SEED, model.device, description.dtype)
    images: Drawn = model.run(call, lambda step, steps: None, lambda: None)["images"]
    return images


def extents(model: HostedModel) -> dict[str, Any]:
    return {name: source._extent for name, source in model._loaded.sources.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", [3.0, 1.2], ids=["room for both", "room for one"])
def test_case_51_two_tasks_share_their_weights_and_either_may_go(
    sd_directory: Path, references: dict[Path, Drawn], share: float
) -> None:
    weights_bytes = sum(described(sd_directory).component_bytes.values())
    device = SimulatedAccelerator(int(share * weights_bytes), Link(4e9), Random(0))
    on = new_device_host(device)
    on.engine.replan(reserve_bytes=0)
    draws = host(sd_directory, on=on, offload="stream")
    redraws = host(sd_directory, on=on, offload="stream", task="image-to-image")
    # In host memory they are the same bytes; on the device each has groups of its own.
    assert extents(draws) == extents(redraws)
    expected, other = references[sd_directory], redrawn(sd_directory)

    def redraw() -> Drawn:
        return draw_with(redraws, redrawing(sd_directory))

    for _ in range(2):
        np.testing.assert_array_equal(draw(draws), expected)
        np.testing.assert_array_equal(redraw(), other)
        stats = on.engine.stats()
        assert stats.resident_bytes + stats.ring_bytes <= stats.budget_bytes
        both = draws.resident_bytes + redraws.resident_bytes
        assert both <= stats.resident_bytes
    assert draws.unload() == []
    np.testing.assert_array_equal(redraw(), other)
    again = host(sd_directory, on=on, offload="stream")
    np.testing.assert_array_equal(draw(again), expected)
    assert redraws.unload() == []
    np.testing.assert_array_equal(draw(again), expected)
    assert again.unload() == []
    assert on.engine.stats().resident_bytes == 0
