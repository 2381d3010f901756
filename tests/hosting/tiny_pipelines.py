"""Real diffusers pipelines of a few hundred kilobytes with random weights, saved as users do.

Promises: the same seed gives the same files; every weight differs from its neighbours and from
zero, so that a picture drawn with a wrong or absent weight differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEXT_WIDTH = 24
SIDE = 16
"""Height and width in pixels of the pictures that these pipelines draw by default."""


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
        vae=_filled(_vae(), seed, dtype),
        text_encoder=_filled(_clip(), seed + 1, dtype),
        tokenizer=_clip_tokenizer(),
        unet=_filled(_unet(width), seed + 2, dtype),
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
        vae=_filled(_vae(), seed, dtype),
        text_encoder=_filled(_clip(), seed + 1, dtype),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_filled(_t5(), seed + 2, dtype),
        tokenizer_2=_t5_tokenizer(),
        transformer=_filled(_flux_transformer(), seed + 3, dtype),
    )


def _filled(module: nn.Module, seed: int, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            is_scale = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(noise + 1.0 if is_scale else noise)
    return nn.Module.to(module.eval(), dtype)


def _vae() -> nn.Module:
    module: nn.Module = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=SIDE,
        shift_factor=0.1,
    )
    return module


def _clip() -> nn.Module:
    module: nn.Module = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=len(_clip_vocabulary()),
            hidden_size=TEXT_WIDTH,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    return module


def _t5() -> nn.Module:
    module: nn.Module = transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=160,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_heads=4,
            relative_attention_num_buckets=8,
            feed_forward_proj="gated-gelu",
        )
    )
    return module


def _unet(width: int) -> nn.Module:
    module: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=SIDE // 2,
        block_out_channels=(width, 2 * width),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    return module


def _flux_transformer() -> nn.Module:
    module: nn.Module = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    return module


def _clip_vocabulary() -> dict[str, int]:
    letters = list(bytes_to_unicode().values())
    symbols = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{one}</w>" for one in letters)]
    return {symbol: index for index, symbol in enumerate(symbols)}


def _clip_tokenizer() -> Any:
    return transformers.CLIPTokenizer(vocab=_clip_vocabulary(), merges=[], model_max_length=16)


def _t5_tokenizer() -> Any:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = [(piece, -1.0 * index) for index, piece in enumerate(pieces)]
    vocabulary += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    return transformers.T5Tokenizer(vocab=vocabulary)
