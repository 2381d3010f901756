"""Tiny denoisers, each with the keyword arguments of one forward."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import nn

Inputs = dict[str, Any]


def flux() -> nn.Module:
    module: nn.Module = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=24,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return module


def flux_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "pooled_projections": torch.randn(1, 24),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(5, 3),
    }


def sd3() -> nn.Module:
    module: nn.Module = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=24,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return module


def sd3_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "pooled_projections": torch.randn(1, 24),
        "timestep": torch.tensor([500.0]),
    }


def sd_unet() -> nn.Module:
    module: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    return module


def sd_unet_inputs() -> Inputs:
    return {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(1, 5, 24),
    }


def sdxl_unet() -> nn.Module:
    module: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32, 32),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 3),
        cross_attention_dim=24,
        attention_head_dim=(2, 4, 4),
        norm_num_groups=8,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 16,
    )
    return module


def sdxl_unet_inputs() -> Inputs:
    return {
        **sd_unet_inputs(),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(1, 16),
            "time_ids": torch.tensor([[8.0, 8.0, 0.0, 0.0, 8.0, 8.0]]),
        },
    }


def pixart() -> nn.Module:
    module: nn.Module = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=3,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=32,
        caption_channels=24,
        num_embeds_ada_norm=100,
        use_additional_conditions=False,
    )
    return module


def pixart_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 5, 24),
        "timestep": torch.tensor([50]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def sana() -> nn.Module:
    module: nn.Module = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=3,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=24,
        sample_size=8,
        patch_size=1,
    )
    return module


def sana_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 5, 24),
        "timestep": torch.tensor([50.0]),
    }


def wan() -> nn.Module:
    module: nn.Module = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=32,
        ffn_dim=48,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return module


def wan_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 5, 24),
        "timestep": torch.tensor([500]),
    }


def ltx() -> nn.Module:
    module: nn.Module = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=3,
        caption_channels=24,
    )
    return module


def ltx_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 2 * 4 * 4, 8),
        "encoder_hidden_states": torch.randn(1, 5, 24),
        "timestep": torch.tensor([500]),
        "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def cogvideox() -> nn.Module:
    module: nn.Module = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=24,
        num_layers=3,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        max_text_seq_length=5,
    )
    return module


def cogvideox_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 5, 24),
        "timestep": torch.tensor([500]),
    }
