"""A pipeline that computes its autoencoder in float32 for a moment gives the plain picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hosting.families import FAMILIES
from hosting.hosting_help import SEED, Drawn, host, run
from hosting.hosting_help import same_values as same
from hosting.tiny_image_families import sdxl

from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.loading.loading import modules

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't:DeprecationWarning"),
]
CALL = FAMILIES["sdxl_img2img"].arguments(output_type="np")


@pytest.fixture(scope="module")
def half_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SDXL stored in bfloat16 whose autoencoder is to encode in float32."""
    directory = tmp_path_factory.mktemp("sdxl")
    pipeline = sdxl()
    assert pipeline.vae.config.force_upcast
    pipeline.to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def expected(half_directory: Path) -> Drawn:
    kind = diffusers.StableDiffusionXLImg2ImgPipeline
    pipeline = kind.from_pretrained(half_directory, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    images: Drawn = pipeline(generator=torch.Generator("cpu").manual_seed(SEED), **CALL).images
    return images


MODES: dict[str, Any] = {
    "resident": {"offload": "none"},
    "leaves": {"offload": "sequential"},
    "disk": {"device_budget": "250KiB"},
}


@pytest.fixture(params=MODES)
def model(request: pytest.FixtureRequest, half_directory: Path) -> HostedModel:
    return host(half_directory, task="image-to-image", **MODES[request.param])


def test_an_autoencoder_that_is_cast_for_a_moment_gives_the_plain_picture(
    model: HostedModel, expected: Drawn
) -> None:
    for _ in range(3):
        same(run(model, CALL)["images"], expected)
    assert modules(model._pipeline)["vae"].dtype == torch.bfloat16
    assert model.unload() == []


def test_a_job_that_ends_while_the_autoencoder_is_cast_leaves_the_next_one_right(
    model: HostedModel, expected: Drawn
) -> None:
    vae = modules(model._pipeline)["vae"]
    vae.to(dtype=torch.float32)
    assert vae.dtype == torch.float32
    same(run(model, CALL)["images"], expected)
    vae.to(dtype=torch.float32)
    model.rest()
    assert vae.dtype == torch.bfloat16
    model.gather(lambda done, total: None)
    same(run(model, CALL)["images"], expected)
    del vae
    assert model.unload() == []
