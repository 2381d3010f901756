"""What the answer of a text encoder follows from beside its inputs, and whether it is only that.

An encoder's answer may be given again if nothing else than inputs, weights and settings shows in
it. What can be seen before a call is looked at before; what a call changes is looked at after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from offloadd.hosting.running.global_state import Randomness

_KNOWN_HOOKS = ("offloadd.", "transformers.")
"""Where hooks come from that leave nothing behind but the answer."""

_OF_TORCH = frozenset(vars(nn.Module()))
"""What every module has: parameters and hooks come and go with the engine. Buffers are looked at by
themselves."""

_NO_STATE = frozenset({"_output_capturing_hooks_installed"})
"""Written once by transformers, when layers are first asked for."""


def is_text_encoder(module: nn.Module) -> bool:
    """Whether it is a model of transformers that takes tokens, and draws nothing by itself."""
    return (
        isinstance(module, PreTrainedModel)
        and module.main_input_name == "input_ids"
        and "input_ids" in inspect.signature(type(module).forward).parameters
        and not any(one.training for one in module.modules())
    )


def is_watched(module: nn.Module) -> bool:
    """Whether somebody has hooked into its layers, who would hear nothing of a call not made."""
    return any(
        not (getattr(hook, "__module__", None) or "").startswith(_KNOWN_HOOKS)
        for one in module.modules()
        for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values())
    )


def settings_of(module: nn.Module) -> tuple[Any, ...]:
    """The module's own settings that its numbers, or the form of its answer, follow from."""
    assert isinstance(module, PreTrainedModel)
    config = module.config
    flags = ("output_hidden_states", "output_attentions", "return_dict", "use_cache")
    return (
        module.training,
        module.dtype,
        str(getattr(config, "_attn_implementation", None)),
        tuple(str(getattr(config, name, None)) for name in flags),
        tuple(_adapters_of(module)),
    )


def global_settings(device: torch.device) -> tuple[Any, ...]:
    """The settings of the process that kernels follow on this device."""
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        backends.fp32_precision,
        *(cuda.matmul.fp32_precision, str(cuda.matmul.allow_fp16_reduced_precision_reduction)),
        str(cuda.matmul.allow_bf16_reduced_precision_reduction),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
        *(cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        *(mkldnn.enabled, mkldnn.deterministic),
    )


def _adapters_of(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """For each layer that adapters add to: which, and how much.

    Layers with adapters that are not worn compute what they did before these came.
    """
    if not getattr(module, "peft_config", None):
        return
    for path, layer in module.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if layer.merged or (layer.active_adapters and not layer.disable_adapters):
            scaling = getattr(layer, "scaling", {})
            yield (
                path,
                tuple(layer.active_adapters),
                tuple(layer.merged_adapters),
                tuple(sorted((str(name), float(one)) for name, one in scaling.items())),
            )


@dataclass(frozen=True, slots=True)
class Held:
    """What a module and the process hold that a call could change and a later one could follow."""

    layers: frozenset[int]
    members: dict[tuple[int, str], Any]
    randomness: Randomness

    @classmethod
    def now(cls, module: nn.Module, device: torch.device) -> Held:
        """As it is."""
        members: dict[tuple[int, str], Any] = {}
        for one in module.modules():
            own = vars(one)
            for name in own.keys() - _OF_TORCH - _NO_STATE:
                members[id(one), name] = own[name]
            for name, buffer in one._buffers.items():
                version = None if buffer is None else buffer._version
                members[id(one), f"buffer {name}"] = (id(buffer), version)
        layers = frozenset(id(one) for one in module.modules())
        return cls(layers, members, Randomness.now(device))

    def is_of_other_layers(self, other: Held) -> bool:
        """Whether layers came or went, as adapters do while a job waits for its turn."""
        return self.layers != other.layers

    def differs_from(self, other: Held) -> bool:
        """Whether anything is another object, or randomness was drawn."""
        if self.members.keys() != other.members.keys():
            return True
        if not torch.equal(self.randomness.cpu, other.randomness.cpu):
            return True
        here, there = self.randomness.device, other.randomness.device
        if here is not None and there is not None and not torch.equal(here, there):
            return True
        return any(
            one is not other.members[key] and not _is_same(one, other.members[key])
            for key, one in self.members.items()
        )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two objects are plain and equal, as what adapters are named and set by again is."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (isinstance(one, (bool, int, float, str)) and bool(one == other))
