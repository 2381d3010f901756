"""Loads tiny pipelines through the hosting room, and draws with them as the tests compare it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import numpy.typing as npt
import torch

from offloadd.channel.specs import model_spec
from offloadd.hosting.arguments import prepare_call
from offloadd.hosting.describe import describe
from offloadd.hosting.hosted import HostedModel

Drawn = npt.NDArray[np.float32]

CPU = torch.device("cpu")
SEED = 11
CALL: dict[str, Any] = {
    "prompt": "a cat on a mat",
    "num_inference_steps": 3,
    "height": 16,
    "width": 16,
    "output_type": "np",
}


def call_arguments(directory: Path, **changes: Any) -> dict[str, Any]:
    """The tests' usual call, with the length that the pipeline's text encoder can take."""
    is_flux = (directory / "transformer").is_dir()
    extra = {"max_sequence_length": 16} if is_flux else {}
    return {**CALL, **extra, **changes}


def plain_script(directory: Path, seed: int = SEED, **changes: Any) -> Drawn:
    """What plain diffusers draws, without any of our code."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator("cpu").manual_seed(seed)
    images: Drawn = pipeline(generator=noise, **call_arguments(directory, **changes)).images
    return images


def host(directory: Path, device: torch.device = CPU, **options: Any) -> HostedModel:
    """A model loaded for the device with these settings."""
    on_cpu = device == CPU
    description = describe(model_spec("tiny", str(directory), options), on_cpu)
    plan = description.plan(1 << 40, 1 << 40, on_cpu)
    return HostedModel.load(description, plan, device, lambda done, total: None)


def draw(
    model: HostedModel,
    seed: int = SEED,
    *,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
    at_border: Callable[[], None] = lambda: None,
    **changes: Any,
) -> Drawn:
    """Draw with a hosted model; gives its images."""
    description = model.description
    arguments = call_arguments(description.files.directory, **changes)
    call = prepare_call(arguments, description.parameters, seed, model.device, description.dtype)
    images: Drawn = model.run(call, on_step, at_border)["images"]
    return images
