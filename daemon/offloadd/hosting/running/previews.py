"""Rough pictures of a running job, from the latents that its pipeline shows after each step.

A rough picture is the mean of the latents' channels, stretched from black to white: it costs no
decoder and shows where things are, not their colours. Pipelines whose call takes no
`callback_on_step_end`, and latents that are not laid out as a picture or a video, give none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MAX_SIDE = 128
"""In pixels; larger latents are thinned out."""

_CALLBACK = "callback_on_step_end"

OnLatents = Callable[[torch.Tensor], None]


def shows_latents(pipeline: type[Any]) -> bool:
    """Whether a pipeline class's call shows its latents after each step."""
    return _CALLBACK in inspect.signature(pipeline.__call__).parameters


def showing(on_latents: OnLatents) -> dict[str, Any]:
    """The arguments by which such a call shows them; what it computes stays the same."""

    def shown(_: Any, step: int, timestep: Any, held: dict[str, Any]) -> dict[str, Any]:
        latents = held.get("latents")
        if isinstance(latents, torch.Tensor):
            on_latents(latents)
        return held

    return {_CALLBACK: shown}


def rough_picture(latents: torch.Tensor) -> npt.NDArray[np.uint8] | None:
    """Height by width in grey, of the first picture of a batch and the middle frame of a video."""
    if latents.ndim == 5:
        latents = latents[:, :, latents.shape[2] // 2]
    if latents.ndim != 4 or 0 in latents.shape:
        return None
    grey = latents[0].detach().float().mean(dim=0)
    every = -(-max(grey.shape) // MAX_SIDE)
    grey = grey[::every, ::every]
    low, high = grey.min(), grey.max()
    grey = torch.nan_to_num((grey - low) / (high - low).clamp(min=1e-6), nan=0.0, posinf=1.0)
    picture: npt.NDArray[np.uint8] = (grey.clamp(0, 1) * 255).to(torch.uint8).cpu().numpy()
    return picture
