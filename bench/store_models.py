"""The pipelines that `store` measures with: random bf16 weights, sharded, saved as users do."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT_TOKENS = 16
CALL: dict[str, Any] = {
    "prompt": "a red circle",
    "height": 64,
    "width": 64,
    "max_sequence_length": TEXT_TOKENS,
}


@dataclass(frozen=True, slots=True)
class Size:
    """What the weights' bytes follow from: blocks of the transformer, widths, encoder layers."""

    double_blocks: int
    single_blocks: int
    heads: int
    text_width: int
    text_layers: int


FULL = Size(double_blocks=6, single_blocks=16, heads=12, text_width=1024, text_layers=20)
"""About 3 GB."""

QUICK = Size(double_blocks=2, single_blocks=4, heads=8, text_width=512, text_layers=8)
TINY = Size(double_blocks=1, single_blocks=2, heads=2, text_width=128, text_layers=2)


def build(directory: Path, size: Size, *, seed: int = 0, shard: str = "500MB") -> int:
    """Write a Flux pipeline; gives the bytes of its weights."""
    import diffusers
    import torch
    import transformers

    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    letters = [*LETTERS, *(f"{one}</w>" for one in LETTERS)]
    words = {symbol: at for at, symbol in enumerate(["<|startoftext|>", "<|endoftext|>", *letters])}
    pieces = [(one, -1.0 * at) for at, one in enumerate(["<pad>", "</s>", "<unk>", "▁", *LETTERS])]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(),
        text_encoder=transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                vocab_size=len(words),
                hidden_size=64,
                num_attention_heads=4,
                num_hidden_layers=2,
                intermediate_size=128,
                max_position_embeddings=77,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=1,
            )
        ),
        tokenizer=transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=77),
        text_encoder_2=transformers.T5EncoderModel(
            transformers.T5Config(
                vocab_size=32128,
                d_model=size.text_width,
                d_kv=64,
                d_ff=4 * size.text_width,
                num_layers=size.text_layers,
                num_heads=size.text_width // 64,
                feed_forward_proj="gated-gelu",
            )
        ),
        tokenizer_2=transformers.T5Tokenizer(vocab=pieces),
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=64,
            num_layers=size.double_blocks,
            num_single_layers=size.single_blocks,
            attention_head_dim=128,
            num_attention_heads=size.heads,
            joint_attention_dim=size.text_width,
            pooled_projection_dim=64,
            axes_dims_rope=(16, 56, 56),
        ),
    )
    torch.set_default_dtype(torch.float32)
    pipeline.save_pretrained(directory, max_shard_size=shard)
    return weights_bytes(directory)


def with_encoder_of(directory: Path, other: Path) -> None:
    """Give a pipeline a copy of another one's large text encoder."""
    shutil.rmtree(directory / "text_encoder_2")
    shutil.copytree(other / "text_encoder_2", directory / "text_encoder_2")


def weight_files(directory: Path) -> list[Path]:
    """The files that hold weights."""
    return sorted(directory.rglob("*.safetensors"))


def weights_bytes(directory: Path) -> int:
    """Their bytes, headers (a few kilobytes) included."""
    return sum(path.stat().st_size for path in weight_files(directory))


def _vae() -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        shift_factor=0.1,
    )
