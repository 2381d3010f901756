"""Real diffusers pipelines of a few hundred kilobytes with random weights, saved as users do.

Promises: the same seed gives the same files; every weight differs from its neighbours and from
zero, so that a picture drawn with a wrong or absent weight differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from hosting.tiny_parts import (
    clip_encoder,
    clip_tokenizer,
    filled,
    flux_transformer,
    sd_unet,
    sd_vae,
    t5_encoder,
    t5_tokenizer,
)


def save_sd(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 16
) -> Path:
    """A `StableDiffusionPipeline` whose U-Net has `width` channels; gives the directory."""
    _sd(seed, dtype, width).save_pretrained(directory)
    return directory


def save_flux(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A `FluxPipeline`, with a T5 encoder whose embedding is tied; gives the directory."""
    _flux(seed, dtype).save_pretrained(directory)
    return directory


def _sd(seed: int, dtype: torch.dtype, width: int) -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=filled(sd_vae(), seed, dtype),
        text_encoder=filled(clip_encoder(), seed + 1, dtype),
        tokenizer=clip_tokenizer(),
        unet=filled(sd_unet(width), seed + 2, dtype),
        scheduler=diffusers.DDIMScheduler(
            clip_sample=False, set_alpha_to_one=False, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _flux(seed: int, dtype: torch.dtype) -> Any:
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=filled(sd_vae(), seed, dtype),
        text_encoder=filled(clip_encoder(), seed + 1, dtype),
        tokenizer=clip_tokenizer(),
        text_encoder_2=filled(t5_encoder(), seed + 2, dtype),
        tokenizer_2=t5_tokenizer(),
        transformer=filled(flux_transformer(), seed + 3, dtype),
    )
