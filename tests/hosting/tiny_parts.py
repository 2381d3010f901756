"""The parts of tiny pipelines: tokenizers, text encoders, autoencoders, denoisers; all local.

Promises: the same seed gives the same weights; every weight differs from its neighbours and from
zero.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEXT_WIDTH = 24
SIDE = 16
"""Height and width in pixels of the pictures that these pipelines draw by default."""


def filled(module: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module in evaluation mode, with weights drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            is_scale = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(noise + 1.0 if is_scale else noise)
    return nn.Module.to(module.eval(), dtype)


def sd_vae() -> nn.Module:
    """Stable Diffusion's autoencoder, which makes sides half as long."""
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


def clip_encoder(width: int = TEXT_WIDTH, projection: int | None = None) -> nn.Module:
    """CLIP's text encoder; with a width to project to, the class that projects."""
    kind = transformers.CLIPTextModel
    if projection is not None:
        kind = transformers.CLIPTextModelWithProjection
    module: nn.Module = kind(
        transformers.CLIPTextConfig(
            vocab_size=len(_byte_vocabulary()),
            hidden_size=width,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=16,
            projection_dim=projection or width,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    return module


def t5_encoder(width: int = 32, *, umt5: bool = False) -> nn.Module:
    """T5's encoder, or UMT5's, whose every layer has a table of positions."""
    config, kind = transformers.T5Config, transformers.T5EncoderModel
    if umt5:
        config, kind = transformers.UMT5Config, transformers.UMT5EncoderModel
    module: nn.Module = kind(
        config(
            vocab_size=160,
            d_model=width,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_heads=4,
            relative_attention_num_buckets=8,
            feed_forward_proj="gated-gelu",
        )
    )
    return module


def sd_unet(width: int = 16, **changes: Any) -> nn.Module:
    """Stable Diffusion's U-Net with `width` channels at its widest pictures."""
    module: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=SIDE // 2,
        block_out_channels=(width, 2 * width),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
        **changes,
    )
    return module


def flux_transformer(**changes: Any) -> nn.Module:
    """Flux's transformer with two double and three single blocks."""
    sizes: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": TEXT_WIDTH,
        "axes_dims_rope": (4, 6, 6),
    }
    module: nn.Module = diffusers.FluxTransformer2DModel(**{**sizes, **changes})
    return module


def _byte_vocabulary() -> dict[str, int]:
    letters = list(bytes_to_unicode().values())
    symbols = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{one}</w>" for one in letters)]
    return {symbol: index for index, symbol in enumerate(symbols)}


def clip_tokenizer() -> Any:
    """CLIP's tokenizer with a token for each letter."""
    return transformers.CLIPTokenizer(vocab=_byte_vocabulary(), merges=[], model_max_length=16)


def t5_tokenizer(**options: Any) -> Any:
    """T5's tokenizer with a token for each small letter."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = [(piece, -1.0 * index) for index, piece in enumerate(pieces)]
    vocabulary += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    return transformers.T5Tokenizer(vocab=vocabulary, **options)


def byte_tokenizer() -> Any:
    """Qwen's tokenizer with a token for each byte, and a template of the kind that it has."""
    tokenizer = transformers.Qwen2Tokenizer(vocab=_byte_vocabulary(), merges=[])
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    )
    return tokenizer


def gemma_tokenizer() -> Any:
    """Gemma's tokenizer with a token for each byte and small letter."""
    symbols = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    symbols += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return transformers.GemmaTokenizer(vocab=vocabulary)


def flow_scheduler(**options: Any) -> Any:
    """The scheduler of models that were trained with flow matching."""
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)
