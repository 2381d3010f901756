"""Real diffusers and transformers models of under a million parameters, with example inputs.

Promises: the same seed gives the same weights and inputs; every weight differs from its neighbours
and from zero, so that an output computed with a wrong or absent weight differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from offload import tiny_denoisers as denoisers
from torch import nn

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A family: how to build it, and the keyword arguments of one call of `entry`."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    entry: str = "forward"

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in evaluation mode with random weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.make().eval().requires_grad_(False)
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in module.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.05
                is_scale = parameter.dim() == 1 and name.endswith("weight")
                parameter.copy_(noise + 1.0 if is_scale else noise)
        return nn.Module.to(module, dtype)

    def example_inputs(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
        """Inputs for one call; floating point tensors have the dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = self.inputs()
        return {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in inputs.items()
        }

    def run(self, module: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """One call without gradients; gives the first tensor of its output."""
        with torch.no_grad():
            result = (
                module(**inputs)
                if self.entry == "forward"
                else getattr(module, self.entry)(**inputs)
            )
        return first_tensor(result)


def first_tensor(result: Any) -> torch.Tensor:
    """The tensor inside a model's output, whichever class the library wraps it in."""
    while not isinstance(result, torch.Tensor):
        result = next(iter(result.values())) if isinstance(result, Mapping) else next(iter(result))
    return result


def _vae() -> nn.Module:
    module: nn.Module = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )
    return module


def _vae_inputs() -> Inputs:
    return {"z": torch.randn(1, 4, 8, 8)}


def wan_vae() -> nn.Module:
    module: nn.Module = diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        scale_factor_spatial=4,
        scale_factor_temporal=2,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return module


def _wan_vae_inputs() -> Inputs:
    return {"z": torch.randn(1, 4, 2, 4, 4)}


def _t5() -> nn.Module:
    module: nn.Module = transformers.T5EncoderModel(_t5_config(transformers.T5Config))
    return module


def _umt5() -> nn.Module:
    module: nn.Module = transformers.UMT5EncoderModel(_t5_config(transformers.UMT5Config))
    return module


def _t5_config(config: Callable[..., Any]) -> Any:
    return config(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu",
    )


def _clip() -> nn.Module:
    module: nn.Module = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=16,
            projection_dim=32,
            bos_token_id=0,
            eos_token_id=2,
        )
    )
    return module


def _token_inputs() -> Inputs:
    return {"input_ids": torch.randint(3, 99, (1, 7))}


def _prior() -> nn.Module:
    module: nn.Module = diffusers.PriorTransformer(
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=3,
        embedding_dim=16,
        num_embeddings=5,
        additional_embeddings=4,
    )
    return module


def _prior_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 16),
        "timestep": torch.tensor([500]),
        "proj_embedding": torch.randn(1, 16),
        "encoder_hidden_states": torch.randn(1, 5, 16),
        "attention_mask": torch.ones(1, 5, dtype=torch.bool),
    }


TINY_MODELS: dict[str, TinyModel] = {
    "flux": TinyModel(denoisers.flux, denoisers.flux_inputs),
    "sd3": TinyModel(denoisers.sd3, denoisers.sd3_inputs),
    "sd_unet": TinyModel(denoisers.sd_unet, denoisers.sd_unet_inputs),
    "sdxl_unet": TinyModel(denoisers.sdxl_unet, denoisers.sdxl_unet_inputs),
    "pixart": TinyModel(denoisers.pixart, denoisers.pixart_inputs),
    "sana": TinyModel(denoisers.sana, denoisers.sana_inputs),
    "wan": TinyModel(denoisers.wan, denoisers.wan_inputs),
    "ltx": TinyModel(denoisers.ltx, denoisers.ltx_inputs),
    "cogvideox": TinyModel(denoisers.cogvideox, denoisers.cogvideox_inputs),
    "vae": TinyModel(_vae, _vae_inputs, "decode"),
    "wan_vae": TinyModel(wan_vae, _wan_vae_inputs, "decode"),
    "t5": TinyModel(_t5, _token_inputs),
    "umt5": TinyModel(_umt5, _token_inputs),
    "clip": TinyModel(_clip, _token_inputs),
    "prior": TinyModel(_prior, _prior_inputs),
}
"""Every family by name."""
