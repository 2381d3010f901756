"""Tiny pipelines of each family that draws pictures, built with the parts that the family has."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from hosting.tiny_parts import (
    TEXT_WIDTH,
    byte_tokenizer,
    clip_encoder,
    clip_tokenizer,
    filled,
    flow_scheduler,
    flux_transformer,
    gemma_tokenizer,
    sd_unet,
    sd_vae,
    t5_encoder,
    t5_tokenizer,
)
from offload import tiny_denoisers as denoisers
from torch import nn


def sd(kind: type[Any] = diffusers.StableDiffusionPipeline, **more: Any) -> Any:
    """Stable Diffusion 1.5, or a pipeline of its parts and `more`."""
    parts: dict[str, Any] = {
        "vae": filled(sd_vae(), 0),
        "text_encoder": filled(clip_encoder(), 1),
        "tokenizer": clip_tokenizer(),
        "unet": filled(sd_unet(), 2),
        "scheduler": diffusers.DDIMScheduler(
            clip_sample=False, set_alpha_to_one=False, steps_offset=1
        ),
        "safety_checker": None,
        "feature_extractor": None,
    }
    return kind(**{**parts, **more})


def sd_controlnet() -> Any:
    """Stable Diffusion with a ControlNet."""
    controlnet = diffusers.ControlNetModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        conditioning_embedding_out_channels=(8, 16),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    kind = diffusers.StableDiffusionControlNetPipeline
    return sd(kind, controlnet=filled(controlnet, 3))


def sd_upscaler() -> Any:
    """Stable Diffusion's upscaler, whose U-Net sees the small picture and its noise level."""
    unet = sd_unet(in_channels=7, num_class_embeds=400)
    return sd(
        diffusers.StableDiffusionUpscalePipeline,
        unet=filled(unet, 2),
        low_res_scheduler=diffusers.DDPMScheduler(),
    )


def sd_editor() -> Any:
    """InstructPix2Pix, whose U-Net sees the picture that is edited."""
    unet = filled(sd_unet(in_channels=8), 2)
    return sd(diffusers.StableDiffusionInstructPix2PixPipeline, unet=unet)


def sdxl() -> Any:
    """SDXL with its two text encoders."""
    return diffusers.StableDiffusionXLPipeline(
        vae=filled(sd_vae(), 0),
        text_encoder=filled(clip_encoder(8), 1),
        tokenizer=clip_tokenizer(),
        text_encoder_2=filled(clip_encoder(16, projection=16), 2),
        tokenizer_2=clip_tokenizer(),
        unet=filled(denoisers.sdxl_unet(), 3),
        scheduler=diffusers.EulerDiscreteScheduler(steps_offset=1, timestep_spacing="leading"),
    )


def sd3() -> Any:
    """Stable Diffusion 3 with its three text encoders."""
    return diffusers.StableDiffusion3Pipeline(
        vae=filled(sd_vae(), 0),
        text_encoder=filled(clip_encoder(8, projection=8), 1),
        tokenizer=clip_tokenizer(),
        text_encoder_2=filled(clip_encoder(16, projection=16), 2),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=filled(t5_encoder(), 3),
        tokenizer_3=t5_tokenizer(),
        transformer=filled(denoisers.sd3(), 4),
        scheduler=flow_scheduler(),
    )


def flux(kind: type[Any] = diffusers.FluxPipeline, **changes: Any) -> Any:
    """Flux, or a pipeline of its parts whose transformer has these changes."""
    return kind(
        vae=filled(sd_vae(), 0),
        text_encoder=filled(clip_encoder(), 1),
        tokenizer=clip_tokenizer(),
        text_encoder_2=filled(t5_encoder(), 2),
        tokenizer_2=t5_tokenizer(),
        transformer=filled(flux_transformer(guidance_embeds=True, **changes), 3),
        scheduler=flow_scheduler(),
    )


def flux_control() -> Any:
    """Flux whose transformer takes a control picture beside the latents."""
    return flux(diffusers.FluxControlPipeline, in_channels=32, out_channels=16)


def flux_kontext() -> Any:
    """Flux Kontext, which edits a picture that stands beside the noise in its sequence."""
    return flux(diffusers.FluxKontextPipeline)


def pixart() -> Any:
    """PixArt-Sigma."""
    return diffusers.PixArtSigmaPipeline(
        vae=filled(sd_vae(), 0),
        text_encoder=filled(t5_encoder(TEXT_WIDTH), 1),
        tokenizer=t5_tokenizer(),
        transformer=filled(denoisers.pixart(), 2),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )


def sana() -> Any:
    """Sana, with a Gemma 2 as its text encoder and a deep-compression autoencoder."""
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
    )
    config = transformers.Gemma2Config(**_decoder_sizes(gemma_tokenizer()), head_dim=8)
    return diffusers.SanaPipeline(
        vae=filled(autoencoder, 0),
        text_encoder=filled(transformers.Gemma2Model(config), 1),
        tokenizer=gemma_tokenizer(),
        transformer=filled(denoisers.sana(), 2),
        scheduler=flow_scheduler(),
    )


def qwen_image() -> Any:
    """Qwen-Image, with a vision-language model as its text encoder."""
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    autoencoder = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return diffusers.QwenImagePipeline(
        vae=filled(autoencoder, 0),
        text_encoder=filled(_qwen_vl(), 1),
        tokenizer=byte_tokenizer(),
        transformer=filled(transformer, 2),
        scheduler=flow_scheduler(use_dynamic_shifting=True),
    )


def z_image() -> Any:
    """Z-Image, with a Qwen 3 as its text encoder."""
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 32, 32],
    )
    config = transformers.Qwen3Config(**_decoder_sizes(byte_tokenizer()), head_dim=8)
    return diffusers.ZImagePipeline(
        vae=filled(sd_vae(), 0),
        text_encoder=filled(transformers.Qwen3Model(config), 1),
        tokenizer=byte_tokenizer(),
        transformer=filled(transformer, 2),
        scheduler=flow_scheduler(use_dynamic_shifting=True),
    )


def _qwen_vl() -> nn.Module:
    text = _decoder_sizes(byte_tokenizer())
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    module: nn.Module = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=text,
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": TEXT_WIDTH,
                "fullatt_block_indexes": [0],
            },
            image_token_id=0,
            video_token_id=0,
            vision_start_token_id=0,
            vision_end_token_id=0,
        )
    )
    return module


def _decoder_sizes(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
