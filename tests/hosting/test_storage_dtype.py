"""Weights stored in 8 bits give the picture of diffusers' own layerwise casting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from hosting.hosting_help import SEED, Drawn, call_arguments, draw, host

from offload_protocol.errors import InvalidRequest
from offloadd.channel.checked_specs import model_spec


def cast_script(directory: Path, storage: torch.dtype) -> Drawn:
    """What plain diffusers draws when it stores the U-Net in 8 bits."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.unet.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
    noise = torch.Generator("cpu").manual_seed(SEED)
    images: Drawn = pipeline(generator=noise, **call_arguments(directory)).images
    return images


@pytest.mark.parametrize("storage", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_case_53_a_picture_from_8_bits_is_that_of_layerwise_casting(
    sd_directory: Path, references: dict[Path, Drawn], where: str, storage: str, tmp_path: Path
) -> None:
    offload: dict[str, Any] = {"mode": "none", "storage_dtype": storage}
    if where == "disk":
        offload = {**offload, "mode": "group", "offload_to_disk_path": str(tmp_path)}
    model = host(sd_directory, components={"unet": offload})
    expected = cast_script(sd_directory, getattr(torch, storage))
    assert np.abs(expected - references[sd_directory]).max() > 1e-3
    for _ in range(3):
        np.testing.assert_array_equal(draw(model), expected)
    assert model.unload() == []


def test_a_storage_dtype_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="float4"):
        model_spec("tiny", "/model", {"offload": {"mode": "none", "storage_dtype": "float4"}})
