"""The networks of `shapes`, untrained: as small as they can be and still be Stable Diffusion."""

from __future__ import annotations

from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from shapes_training.pictures import SIDE
from shapes_training.tokenizer import MAX_TOKENS

_TEXT_WIDTH = 64


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_TEXT_WIDTH,
        intermediate_size=4 * _TEXT_WIDTH,
        projection_dim=_TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 48, 64),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        sample_size=SIDE,
    )


def build_unet(vae: AutoencoderKL) -> UNet2DConditionModel:
    # The pipeline takes its default picture size from here: 8 latents by a factor of 8.
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    return UNet2DConditionModel(
        sample_size=SIDE // factor,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(64, 128),
        layers_per_block=1,
        cross_attention_dim=_TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=16,
    )


def build_scheduler() -> DDIMScheduler:
    # A plain background is a large constant signal; only a schedule that ends in pure noise lets
    # the first step choose it. That needs v-prediction, and steps counted back from the last one.
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )
