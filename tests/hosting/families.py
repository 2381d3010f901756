"""Every family of pipelines that is proved to be hosted, each with a call that its tiny form takes.

The calls ask for all kinds of inputs (images, masks, arrays, lists) and of outputs (images, arrays,
tensors, latents, frames, sound).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hosting import tiny_image_families as images
from hosting import tiny_video_families as videos
from hosting.tiny_parts import SIDE
from PIL import Image

PROMPT = "a cat on a mat"


@dataclass(frozen=True, slots=True)
class Family:
    """How to build it, how to call it, and the task it is hosted for if not the one it is saved as.

    `plain_class` names the class of diffusers that a plain script would take for the task.
    """

    build: Callable[[], Any]
    call: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    plain_class: str = "DiffusionPipeline"

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """The call's keyword arguments, as a client gives them."""
        usual = {"prompt": PROMPT, "num_inference_steps": 2}
        return {**usual, **self.call, **changes}


def picture(shift: int = 0, side: int = SIDE) -> Image.Image:
    """A picture in which no pixel is like its neighbours."""
    rows = np.arange(side * side * 3).reshape(side, side, 3) * 37 + shift
    return Image.fromarray((rows % 256).astype(np.uint8))


def mask() -> Image.Image:
    """Half of a picture."""
    half = np.zeros((SIDE, SIDE), np.uint8)
    half[:, SIDE // 2 :] = 255
    return Image.fromarray(half)


SMALL: Mapping[str, Any] = {"height": SIDE, "width": SIDE}
SHORT: Mapping[str, Any] = {"max_sequence_length": 16}
VIDEO: Mapping[str, Any] = {**SMALL, **SHORT, "num_frames": 5}

FAMILIES: dict[str, Family] = {
    "sd": Family(images.sd, {**SMALL, "output_type": "pil"}),
    "sd_inpaint": Family(
        images.sd,
        {**SMALL, "image": picture(), "mask_image": mask(), "output_type": "np", "strength": 1.0},
        "inpainting",
        "StableDiffusionInpaintPipeline",
    ),
    "sd_controlnet": Family(
        images.sd_controlnet, {**SMALL, "image": picture(), "output_type": "np"}
    ),
    "sd_upscaler": Family(
        images.sd_upscaler, {"image": picture(), "noise_level": 10, "output_type": "pil"}
    ),
    "sd_editor": Family(images.sd_editor, {"image": picture(), "output_type": "np"}),
    "sdxl": Family(images.sdxl, {**SMALL, "negative_prompt": "a dog", "output_type": "np"}),
    "sdxl_img2img": Family(
        images.sdxl,
        {"image": picture(), "strength": 1.0, "output_type": "pt"},
        "image-to-image",
        "StableDiffusionXLImg2ImgPipeline",
    ),
    "sd3": Family(images.sd3, {**SMALL, **SHORT, "output_type": "latent"}),
    "flux": Family(images.flux, {**SMALL, **SHORT, "output_type": "pt"}),
    "flux_img2img": Family(
        images.flux,
        {**SMALL, **SHORT, "image": picture(), "strength": 1.0, "output_type": "np"},
        "image-to-image",
        "FluxImg2ImgPipeline",
    ),
    "flux_inpaint": Family(
        images.flux,
        {
            **SMALL,
            **SHORT,
            "image": picture(),
            "mask_image": mask(),
            "strength": 1.0,
            "output_type": "pil",
        },
        "inpainting",
        "FluxInpaintPipeline",
    ),
    "flux_control": Family(
        images.flux_control, {**SMALL, **SHORT, "control_image": picture(), "output_type": "np"}
    ),
    "flux_kontext": Family(
        images.flux_kontext,
        {**SMALL, **SHORT, "image": picture(), "max_area": SIDE * SIDE, "_auto_resize": False},
    ),
    "pixart": Family(
        images.pixart,
        {
            **SMALL,
            **SHORT,
            "use_resolution_binning": False,
            "clean_caption": False,
            "output_type": "np",
        },
    ),
    "sana": Family(
        images.sana,
        {
            **SHORT,
            "height": 32,
            "width": 32,
            "use_resolution_binning": False,
            "complex_human_instruction": ["draw: "],
            "output_type": "np",
        },
    ),
    "qwen_image": Family(
        images.qwen_image,
        {**SMALL, **SHORT, "negative_prompt": "a dog", "output_type": "np"},
    ),
    "z_image": Family(images.z_image, {**SMALL, **SHORT, "output_type": "np"}),
    "wan": Family(videos.wan, {**VIDEO, "output_type": "pil"}),
    "wan_dual": Family(videos.wan_dual, {**VIDEO, "output_type": "np"}),
    "ltx": Family(
        videos.ltx,
        {**VIDEO, "height": 32, "width": 32, "num_frames": 9, "output_type": "pt"},
    ),
    "ltx_image_to_video": Family(
        videos.ltx,
        {
            **VIDEO,
            "height": 32,
            "width": 32,
            "num_frames": 9,
            "image": picture(side=32),
            "output_type": "np",
        },
        "image-to-video",
        "LTXImageToVideoPipeline",
    ),
    "cogvideox": Family(videos.cogvideox, {**VIDEO, "max_sequence_length": 5, "output_type": "np"}),
    "stable_audio": Family(videos.stable_audio, {"audio_end_in_s": 1.0}),
}
"""By name."""
