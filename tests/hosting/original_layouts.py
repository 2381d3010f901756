"""Turns tiny pipelines' weights into single files as the models' authors lay theirs out.

The inverse of the conversions of `diffusers.loaders.single_file_utils`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING
from safetensors.torch import save_file

State = dict[str, torch.Tensor]

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}
_OPEN_CLIP = {
    "encoder.layers.": "transformer.resblocks.",
    ".fc1.": ".c_fc.",
    ".fc2.": ".c_proj.",
    "self_attn": "attn",
    "final_layer_norm": "ln_final",
    "layer_norm": "ln_",
    "embeddings.token_embedding": "token_embedding",
    "embeddings.position_embedding.weight": "positional_embedding",
}


def save_original(state: Mapping[str, torch.Tensor], path: Path) -> Path:
    """Write tensors that share no memory."""
    save_file({name: one.clone().contiguous() for name, one in state.items()}, path)
    return path


def without_weights(directory: Path) -> Path:
    """Leave a saved pipeline's configurations alone."""
    for path in directory.rglob("*.safetensors"):
        path.unlink()
    return directory


def sd_state(pipeline: Any) -> State:
    """Stable Diffusion 1.5 in one file."""
    return {
        **unet_state(pipeline.unet),
        **vae_state(pipeline.vae),
        **_prefixed(_text_model(pipeline.text_encoder), "cond_stage_model.transformer."),
    }


def sdxl_state(pipeline: Any) -> State:
    """SDXL in one file, its second text encoder as open_clip has it."""
    return {
        **unet_state(pipeline.unet),
        **vae_state(pipeline.vae),
        **_prefixed(_text_model(pipeline.text_encoder), "conditioner.embedders.0.transformer."),
        **_prefixed(_open_clip(pipeline.text_encoder_2), "conditioner.embedders.1.model."),
    }


def unet_state(unet: Any) -> State:
    """A U-Net under `model.diffusion_model.`."""
    layers = unet.config.layers_per_block + 1
    names = DIFFUSERS_TO_LDM_MAPPING["unet"]
    fixed = {**names["layers"], **names["addition_embed_type"]}

    def original(name: str) -> str:
        if name in fixed:
            return str(fixed[name])
        place, _, rest = name.partition(".")
        parts = rest.split(".")
        if place == "mid_block":
            number = {"resnets.0": 0, "attentions.0": 1, "resnets.1": 2}[".".join(parts[:2])]
            return f"middle_block.{number}." + _inner(parts[0], ".".join(parts[2:]))
        block, kind, inner = int(parts[0]), parts[1], ".".join(parts[3:])
        if kind == "downsamplers":
            return f"input_blocks.{(block + 1) * layers}.0.op." + inner.removeprefix("conv.")
        if kind == "upsamplers":
            has_attention = hasattr(unet.up_blocks[block], "attentions")
            at = f"output_blocks.{block * layers + layers - 1}.{1 + has_attention}."
            return at + inner
        number = block * layers + int(parts[2]) + (1 if place == "down_blocks" else 0)
        side = "input_blocks" if place == "down_blocks" else "output_blocks"
        return f"{side}.{number}.{int(kind == 'attentions')}." + _inner(kind, inner)

    state = {original(name): one for name, one in unet.state_dict().items()}
    return _prefixed(state, "model.diffusion_model.")


def vae_state(vae: Any) -> State:
    """An autoencoder under `first_stage_model.`, its attention as convolutions."""
    last = len(vae.config.up_block_types) - 1

    def original(name: str) -> str:
        name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        name = re.sub(r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block.", name)
        name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0\.", r"down.\1.downsample.", name)
        name = re.sub(
            r"up_blocks\.(\d+)\.", lambda found: f"up.{last - int(found[1])}.", name
        ).replace("resnets", "block")
        name = name.replace("upsamplers.0", "upsample")
        name = re.sub(
            r"mid_block\.block\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", name
        )
        if "mid_block.attentions.0" in name:
            name = name.replace("mid_block.attentions.0", "mid.attn_1")
            for ours, theirs in _VAE_ATTENTION.items():
                name = name.replace(f".{ours}.", f".{theirs}.")
        return name

    state = {original(name): one for name, one in vae.state_dict().items()}
    for name, one in state.items():
        if re.search(r"attn_1\.(q|k|v|proj_out)\.weight", name):
            state[name] = one[:, :, None, None]
    return _prefixed(state, "first_stage_model.")


def sd3_state(transformer: Any) -> State:
    """Stable Diffusion 3's transformer, as its authors publish it beside no encoders."""
    from_ours = transformer.state_dict()
    last = transformer.config.num_layers - 1
    state: State = {
        "pos_embed": from_ours["pos_embed.pos_embed"],
        **_moved(from_ours, "pos_embed.proj", "x_embedder.proj"),
        **_moved(from_ours, "time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.0"),
        **_moved(from_ours, "time_text_embed.timestep_embedder.linear_2", "t_embedder.mlp.2"),
        **_moved(from_ours, "time_text_embed.text_embedder.linear_1", "y_embedder.mlp.0"),
        **_moved(from_ours, "time_text_embed.text_embedder.linear_2", "y_embedder.mlp.2"),
        **_moved(from_ours, "context_embedder", "context_embedder"),
        **_moved(from_ours, "proj_out", "final_layer.linear"),
        **_swapped(from_ours, "norm_out.linear", "final_layer.adaLN_modulation.1"),
    }
    for number in range(last + 1):
        ours, theirs = f"transformer_blocks.{number}.", f"joint_blocks.{number}."
        x, context = theirs + "x_block.", theirs + "context_block."
        state |= _joined(from_ours, f"{ours}attn.to_{{}}", f"{x}attn.qkv")
        state |= _joined(from_ours, f"{ours}attn.add_{{}}_proj", f"{context}attn.qkv")
        state |= _joined(from_ours, f"{ours}attn2.to_{{}}", f"{x}attn2.qkv")
        change = _swapped if number == last else _moved
        moves = {
            "attn.norm_q": f"{x}attn.ln_q",
            "attn.norm_k": f"{x}attn.ln_k",
            "attn.norm_added_q": f"{context}attn.ln_q",
            "attn.norm_added_k": f"{context}attn.ln_k",
            "attn.to_out.0": f"{x}attn.proj",
            "attn.to_add_out": f"{context}attn.proj",
            "attn2.norm_q": f"{x}attn2.ln_q",
            "attn2.norm_k": f"{x}attn2.ln_k",
            "attn2.to_out.0": f"{x}attn2.proj",
            "norm1.linear": f"{x}adaLN_modulation.1",
            "ff.net.0.proj": f"{x}mlp.fc1",
            "ff.net.2": f"{x}mlp.fc2",
            "ff_context.net.0.proj": f"{context}mlp.fc1",
            "ff_context.net.2": f"{context}mlp.fc2",
        }
        for here, there in moves.items():
            state |= _moved(from_ours, ours + here, there)
        state |= change(from_ours, f"{ours}norm1_context.linear", f"{context}adaLN_modulation.1")
    return _prefixed(state, "model.diffusion_model.")


def flux_header(path: Path) -> Path:
    """A Flux transformer of real width with one block of each kind; its bytes are a hole."""
    width, mlp = 3072, 12288
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out_width: int, in_width: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out_width, in_width), (out_width,)

    for name, (out_width, in_width) in {
        "img_in": (width, 64),
        "txt_in": (width, 4096),
        "time_in.in_layer": (width, 256),
        "time_in.out_layer": (width, width),
        "vector_in.in_layer": (width, 768),
        "vector_in.out_layer": (width, width),
        "final_layer.linear": (64, width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
        "single_blocks.0.modulation.lin": (3 * width, width),
        "single_blocks.0.linear1": (3 * width + mlp, width),
        "single_blocks.0.linear2": (width, width + mlp),
    }.items():
        linear(name, out_width, in_width)
    for side in ("img", "txt"):
        linear(f"double_blocks.0.{side}_mod.lin", 6 * width, width)
        linear(f"double_blocks.0.{side}_attn.qkv", 3 * width, width)
        linear(f"double_blocks.0.{side}_attn.proj", width, width)
        linear(f"double_blocks.0.{side}_mlp.0", mlp, width)
        linear(f"double_blocks.0.{side}_mlp.2", width, mlp)
    for place in ("double_blocks.0.img_attn", "double_blocks.0.txt_attn", "single_blocks.0"):
        for which in ("query", "key"):
            shapes[f"{place}.norm.{which}_norm.scale"] = (128,)
    entries, offset = {}, 0
    for name, shape in shapes.items():
        stop = offset + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return path


def _inner(kind: str, name: str) -> str:
    if kind != "resnets":
        return name
    layer, _, rest = name.partition(".")
    return f"{_RESNET[layer]}.{rest}"


def _text_model(encoder: Any) -> State:
    names = {name: name.removeprefix("text_model.") for name in encoder.state_dict()}
    return {f"text_model.{names[name]}": one for name, one in encoder.state_dict().items()}


def _open_clip(encoder: Any) -> State:
    state: State = {}
    for name, one in encoder.state_dict().items():
        bare = name.removeprefix("text_model.")
        for ours, theirs in _OPEN_CLIP.items():
            bare = bare.replace(ours, theirs)
        state[bare] = one
    state["text_projection"] = state.pop("text_projection.weight").T
    for name in [name for name in state if ".attn.q_proj." in name]:
        layer, _, what = name.partition("q_proj.")
        parts = [state.pop(f"{layer}{one}_proj.{what}") for one in "qkv"]
        state[f"{layer}in_proj_{what}"] = torch.cat(parts)
    return state


def _moved(state: State, ours: str, theirs: str) -> State:
    return {
        f"{theirs}.{what}": state[f"{ours}.{what}"]
        for what in ("weight", "bias")
        if f"{ours}.{what}" in state
    }


def _swapped(state: State, ours: str, theirs: str) -> State:
    moved = _moved(state, ours, theirs)
    return {name: torch.cat(one.chunk(2)[::-1]) for name, one in moved.items()}


def _joined(state: State, ours: str, theirs: str) -> State:
    return {
        f"{theirs}.{what}": torch.cat([state[f"{ours.format(one)}.{what}"] for one in "qkv"])
        for what in ("weight", "bias")
        if f"{ours.format('q')}.{what}" in state
    }


def _prefixed(state: State, prefix: str) -> State:
    return {prefix + name: one for name, one in state.items()}
