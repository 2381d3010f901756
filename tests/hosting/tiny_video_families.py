"""Tiny pipelines of each family that makes videos or sound."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from hosting.tiny_parts import TEXT_WIDTH, filled, flow_scheduler, t5_encoder, t5_tokenizer
from offload import tiny_denoisers as denoisers
from offload.tiny_models import wan_vae


def wan(**more: Any) -> Any:
    """Wan with one transformer, or with what `more` says."""
    parts: dict[str, Any] = {
        "vae": filled(wan_vae(), 0),
        "text_encoder": filled(t5_encoder(TEXT_WIDTH, umt5=True), 1),
        "tokenizer": t5_tokenizer(),
        "transformer": filled(denoisers.wan(), 2),
        "transformer_2": None,
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    }
    return diffusers.WanPipeline(**{**parts, **more})


def wan_dual() -> Any:
    """Wan 2.2, whose second transformer takes over below a noise level."""
    return wan(transformer_2=filled(denoisers.wan(), 3), boundary_ratio=0.8)


def ltx() -> Any:
    """LTX-Video."""
    autoencoder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
    )
    return diffusers.LTXPipeline(
        vae=filled(autoencoder, 0),
        text_encoder=filled(t5_encoder(TEXT_WIDTH), 1),
        tokenizer=t5_tokenizer(),
        transformer=filled(denoisers.ltx(), 2),
        scheduler=flow_scheduler(),
    )


def cogvideox() -> Any:
    """CogVideoX."""
    autoencoder = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        sample_height=16,
        sample_width=16,
    )
    return diffusers.CogVideoXPipeline(
        vae=filled(autoencoder, 0),
        text_encoder=filled(t5_encoder(TEXT_WIDTH), 1),
        tokenizer=t5_tokenizer(),
        transformer=filled(denoisers.cogvideox(), 2),
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )


def stable_audio() -> Any:
    """Stable Audio, whose autoencoder computes its weights from two parts for each use."""
    transformer = diffusers.StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        cross_attention_dim=8,
        time_proj_dim=8,
        global_states_input_dim=16,
        cross_attention_input_dim=8,
    )
    autoencoder = diffusers.AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[1, 2],
        channel_multiples=[1, 2],
        decoder_channels=4,
        decoder_input_channels=4,
        audio_channels=2,
        sampling_rate=8,
    )
    projection = StableAudioProjectionModel(
        text_encoder_dim=TEXT_WIDTH, conditioning_dim=8, min_value=0, max_value=32
    )
    return diffusers.StableAudioPipeline(
        vae=filled(autoencoder, 0),
        text_encoder=filled(t5_encoder(TEXT_WIDTH), 1),
        projection_model=filled(projection, 2),
        tokenizer=t5_tokenizer(model_max_length=16),
        transformer=filled(transformer, 3),
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(
            prediction_type="v_prediction", sigma_schedule="exponential"
        ),
    )
