"""A task chooses the pipeline that does it with a model's weights, or says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from hosting.test_describe import described

from offload_protocol.errors import InvalidRequest, ModelLoadFailed
from offloadd.channel.specs import Task
from offloadd.hosting.sources.tasks import class_for_task


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
