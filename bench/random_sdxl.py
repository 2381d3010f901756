"""Writes an SDXL pipeline with random weights, without ever holding more than one of its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from transformers.convert_slow_tokenizer import bytes_to_unicode

_WELL = 1 << 25
"""Random numbers that are drawn; larger weights repeat them."""


def write_sdxl(directory: Path, *, is_full: bool) -> int:
    """Save the pipeline in bfloat16; gives the bytes of its weights."""
    widths = (320, 640, 1280) if is_full else (32, 64, 128)
    small, large = (768, 1280) if is_full else (32, 64)
    unet = {
        "sample_size": 128,
        "block_out_channels": widths,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": tuple(width // 32 for width in widths),
        "num_attention_heads": None,
        "cross_attention_dim": small + large,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 6 * 256 + large,
    }
    vae_widths = (128, 256, 512, 512) if is_full else (32, 32, 32, 32)
    vae = {
        "block_out_channels": vae_widths,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
        "latent_channels": 4,
        "scaling_factor": 0.13025,
    }
    parts: dict[str, nn.Module] = {}
    total_bytes = 0
    builders: dict[str, Callable[[], Any]] = {
        "unet": lambda: diffusers.UNet2DConditionModel(**unet),
        "vae": lambda: diffusers.AutoencoderKL(**vae),
        "text_encoder": lambda: transformers.CLIPTextModel(_text(small, 12 if is_full else 2)),
        "text_encoder_2": lambda: transformers.CLIPTextModelWithProjection(
            _text(large, 32 if is_full else 2)
        ),
    }
    for name, build in builders.items():
        with torch.device("meta"):
            module: Any = build()
        module = filled(module)
        module.save_pretrained(directory / name)
        total_bytes += sum(one.nbytes for one in module.parameters())
        parts[name] = module.to("meta")
    pipeline = diffusers.StableDiffusionXLPipeline(
        **parts,
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )
    pipeline.tokenizer.save_pretrained(directory / "tokenizer")
    pipeline.tokenizer_2.save_pretrained(directory / "tokenizer_2")
    pipeline.scheduler.save_pretrained(directory / "scheduler")
    pipeline.save_config(directory)
    return total_bytes


def _text(width: int, layers: int) -> Any:
    return transformers.CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def filled(module: Any) -> Any:
    """The module, which is on meta, with random bfloat16 weights."""
    generator = torch.Generator().manual_seed(0)
    well = (torch.randn(_WELL, generator=generator) * 0.02).to(torch.bfloat16)
    module = nn.Module.to_empty(module.to(torch.bfloat16), device="cpu")
    start = 0
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            flat = parameter.view(-1)
            for at in range(0, flat.numel(), _WELL // 2):
                piece = flat[at : at + _WELL // 2]
                start = (start + 7919) % (_WELL // 2)
                piece.copy_(well[start : start + piece.numel()])
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.add_(1.0)
        for name, buffer in module.named_buffers():
            if name.endswith("position_ids"):
                buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
    return module


def _tokenizer() -> Any:
    letters = list(bytes_to_unicode().values())
    symbols = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{one}</w>" for one in letters)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)
