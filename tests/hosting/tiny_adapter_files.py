"""Adapter files for the tiny Stable Diffusion pipeline, as diffusers saves and loads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from hosting.hosting_help import SEED, Drawn, call_arguments
from offload.tiny_adapters import StateDict, lora
from safetensors.torch import save_file

ATTENTION = ("to_q", "to_k", "to_v")
CONVOLUTIONS = ("to_q", "conv1", "proj_in")
ENCODER = ("q_proj", "out_proj")


def sd_adapter(directory: Path, seed: int, targets: Sequence[str], *, encoder: bool) -> StateDict:
    """A LoRA of the U-Net and, with `encoder`, of the text encoder of `save_sd`'s pipeline."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directory)
    found = {f"unet.{key}": one for key, one in lora(pipeline.unet, targets, seed=seed).items()}
    if encoder:
        inner = lora(pipeline.text_encoder, ENCODER, seed=seed + 1)
        found |= {f"text_encoder.{key}": one for key, one in inner.items()}
    return found


def save_adapter(file: Path, state: StateDict) -> Path:
    """Write it; gives the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, file)
    return file


def plain_with(
    directory: Path,
    files: dict[str, Path],
    weights: dict[str, float],
    seed: int = SEED,
    change: Callable[[Any], None] = lambda pipeline: None,
    **more: Any,
) -> Drawn:
    """What plain diffusers draws with these weights for adapters, each loaded from its file.

    `change` is done to the pipeline when it wears them.
    """
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    for name in weights:
        file = files[name]
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name)
    if weights:
        pipeline.set_adapters(list(weights), list(weights.values()))
    change(pipeline)
    noise = torch.Generator("cpu").manual_seed(seed)
    images: Drawn = pipeline(generator=noise, **call_arguments(directory, **more)).images
    return images
