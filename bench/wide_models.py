"""Pipelines like `shapes`, with a denoiser of random weights as wide and deep as asked for."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from offloadd.hosting.sources.sources import source_directory


@dataclass(frozen=True, slots=True)
class Width:
    """How wide the lower level of the denoiser is, and how many transformer layers a block has."""

    channels: int
    layers: int


def wide_model(directory: Path, width: Width, seed: int = 1) -> Path:
    """Write the pipeline into a new directory; one seed gives the same weights each time."""
    shutil.copytree(source_directory("builtin:shapes"), directory)
    shutil.rmtree(directory / "unet")
    torch.manual_seed(seed)
    unet: Any = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(64, width.channels),
        layers_per_block=1,
        transformer_layers_per_block=(1, width.layers),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=(4, 8),
        norm_num_groups=16,
    )
    unet.save_pretrained(directory / "unet")
    return directory
