"""Adapter matrices by the names of the layers that they are for, whichever trainer named them.

The names are those that diffusers gives them when it loads the file. Promises: no matrix is read;
what stands for one takes the memory of a single number until a conversion computes with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.loaders import StableDiffusionXLLoraLoaderMixin
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)

from offload_protocol.errors import InvalidRequest
from offloadd.offload.weights.forms import DTYPE_NAMES, DTYPES
from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import TensorSpec

_STUMBLES = (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError)
"""What the conversions raise for names that they do not know, as seen."""


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """What adapters are for: a pipeline's class, and its components' weights by their names."""

    pipeline_class: Any
    checkpoints: Mapping[str, CheckpointIndex]
    unet_config: Mapping[str, Any] = field(default_factory=dict)


def named_by_layer(specs: Mapping[str, TensorSpec], base: AdapterBase) -> dict[str, TensorSpec]:
    """Every matrix as `COMPONENT.LAYER.lora_A.weight` or `lora_B`.

    Raises `InvalidRequest` for names that diffusers does not know.
    """
    try:
        state = _converted(specs, base)
        named: dict[str, torch.Tensor] = {}
        for component in sorted({name.partition(".")[0] for name in state}):
            own = {
                name.removeprefix(f"{component}."): one
                for name, one in state.items()
                if name.startswith(f"{component}.")
            }
            inner = _as_loaded(own, component)
            named |= {f"{component}.{name}": one for name, one in inner.items()}
    except _STUMBLES as error:
        told = " ".join(str(error).split())[:200]
        raise InvalidRequest(
            f"its names cannot be told apart: {told or type(error).__name__}",
            hint="use an adapter that diffusers loads into this kind of model",
        ) from error
    return {
        name: TensorSpec(name, DTYPE_NAMES[one.dtype], tuple(one.shape))
        for name, one in named.items()
    }


def _converted(specs: Mapping[str, TensorSpec], base: AdapterBase) -> dict[str, torch.Tensor]:
    blanks = {
        name: torch.ones(1, dtype=DTYPES[spec.dtype]).expand(spec.shape)
        if spec.shape
        else torch.ones((), dtype=DTYPES[spec.dtype])
        for name, spec in specs.items()
    }
    more: dict[str, Any] = {}
    if issubclass(base.pipeline_class, StableDiffusionXLLoraLoaderMixin):
        more["unet_config"] = SimpleNamespace(**base.unet_config)
    found: Any = base.pipeline_class.lora_state_dict(blanks, **more)
    state: dict[str, torch.Tensor] = found[0] if isinstance(found, tuple) else found
    return state


def _as_loaded(state: dict[str, torch.Tensor], component: str) -> dict[str, torch.Tensor]:
    if any("lora_A" in name for name in state):
        return state
    if component.startswith("text_encoder"):
        state = convert_state_dict_to_peft(convert_state_dict_to_diffusers(state))
    else:
        state = convert_unet_state_dict_to_peft(state)
    return state
