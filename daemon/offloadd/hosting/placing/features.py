"""A component's features beside its offloading: tiles, slices, strides, attention, compiled blocks.

They are switched on before the engine takes a module over. Promises: a feature that a component is
asked for by its own name works or is refused with the reason; one that the whole model is asked for
goes to every component that has it, and is refused if none has; no other model notices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

from offload_protocol.errors import InvalidRequest
from offloadd.channel.specs import FEATURES, OffloadSpec
from offloadd.hosting.placing.offload_plan import Plan

_CODE_FROM_THE_HUB = "_hub"


class _NotThere(Exception):
    """A module does not have a feature; the text says what it lacks."""


def switch_on_features(
    model: str, parts: Mapping[str, nn.Module], plan: Plan, own: Mapping[str, OffloadSpec]
) -> None:
    """Switch on what the plan asks for; `own` are the settings of single components.

    Raises `InvalidRequest` with the component and the reason.
    """
    for feature in FEATURES:
        lacking: dict[str, str] = {}
        wanted = {name: getattr(plan[name], feature) for name in parts if name in plan}
        wanted = {name: value for name, value in wanted.items() if value}
        for name, value in wanted.items():
            try:
                _SWITCHES[feature](parts[name], value)
            except _NotThere as reason:
                lacking[name] = str(reason)
        refused = {name: why for name, why in lacking.items() if name in own}
        if wanted and len(lacking) == len(wanted):
            refused = lacking
        for name, why in refused.items():
            raise InvalidRequest(
                f"model {model!r}: {name!r} cannot have {feature} = {_written(wanted[name])}: "
                f"{why}",
                hint="leave it out, or set it for components that have it",
                details={"component": name, "setting": feature},
            )


def _tiling(module: Any, _: bool) -> None:
    if not hasattr(module, "enable_tiling") or not hasattr(module, "use_tiling"):
        raise _NotThere(f"{type(module).__name__} does not decode in tiles")
    module.enable_tiling()


def _slicing(module: Any, _: bool) -> None:
    if not hasattr(module, "enable_slicing") or not hasattr(module, "use_slicing"):
        raise _NotThere(f"{type(module).__name__} does not decode picture by picture")
    module.enable_slicing()


def _channels_last(module: Any, _: bool) -> None:
    if not any(parameter.dim() == 4 for parameter in module.parameters()):
        raise _NotThere(f"{type(module).__name__} has no weights of four dimensions")
    module.to(memory_format=torch.channels_last)


def _attention(module: Any, backend: str) -> None:
    if backend.endswith(_CODE_FROM_THE_HUB):
        raise _NotThere("its code would be downloaded when it is used")
    takers = [one for one in module.modules() if hasattr(getattr(one, "processor", None), _BACKEND)]
    if not takers or not hasattr(module, "set_attention_backend"):
        raise _NotThere(f"the attention of {type(module).__name__} takes no backend")
    before = _AttentionBackendRegistry.get_active_backend()[0]
    try:
        module.set_attention_backend(backend)
    except (ValueError, RuntimeError, ImportError) as error:
        raise _NotThere(" ".join(str(error).split())) from error
    finally:
        # Diffusers also makes it the backend of all models that have none of their own.
        _AttentionBackendRegistry.set_active_backend(before)


def _compile(module: Any, _: str) -> None:
    blocks = getattr(module, "_repeated_blocks", None)
    if not blocks:
        raise _NotThere(f"{type(module).__name__} names no blocks that repeat")
    module.compile_repeated_blocks()


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


_BACKEND = "_attention_backend"
_SWITCHES: dict[str, Callable[[Any, Any], None]] = {
    "tiling": _tiling,
    "slicing": _slicing,
    "channels_last": _channels_last,
    "attention_backend": _attention,
    "compile": _compile,
}
