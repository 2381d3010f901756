"""Loads a component with the `from_pretrained` of its own class, whole and into plain memory.

Only the writer of packs does that: it takes memory and time, and changes settings of its process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.channel.specs import QuantizationSpec
from offloadd.hosting.loading.stand_ins import class_to_build
from offloadd.hosting.quantization.gguf_files import load_gguf
from offloadd.hosting.quantization.library import settings_for
from offloadd.hosting.sources.classes import component_class

_log = logging.getLogger(__name__)

UNFIT = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError)
"""What diffusers and transformers raise for files that do not fit, as seen."""


def load_plain(
    component: str,
    library: str,
    class_name: str,
    directory: Path,
    variant: str | None,
    dtype: torch.dtype,
    quantization: QuantizationSpec | None = None,
) -> nn.Module:
    """The module with its weights; raises `ModelLoadFailed` with the component's name."""
    kind = component_class(component, library, class_name)
    more: dict[str, Any] = {}
    try:
        if quantization is not None:
            built = class_to_build(component, kind, directory)
            more["quantization_config"] = settings_for(built, quantization)
        module, news = kind.from_pretrained(
            str(directory),
            dtype=dtype,
            variant=variant,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **more,
        )
    except UNFIT as error:
        raise unfit(component, class_name, directory, error) from error
    _check_complete(component, class_name, directory, module, news)
    made: nn.Module = module.eval()
    return made


def load_from_gguf(
    component: str,
    library: str,
    class_name: str,
    directory: Path,
    weights: Path,
    dtype: torch.dtype,
) -> nn.Module:
    """The module with the weights of a GGUF file; `directory` holds its configuration.

    Raises `ModelLoadFailed` with the component's name.
    """
    try:
        kind = class_to_build(component, component_class(component, library, class_name), directory)
        module = load_gguf(kind, weights, directory, dtype)
    except UNFIT as error:
        raise unfit(component, class_name, weights, error) from error
    _check_complete(component, class_name, weights, module, {})
    return module


def unfit(
    component: str, class_name: str, directory: Path, error: BaseException
) -> ModelLoadFailed:
    """The error for files that a class cannot be built from."""
    told = " ".join(str(error).split())[:500] or type(error).__name__
    return ModelLoadFailed(
        f"component {component!r} ({class_name}) cannot be built from {directory}: {told}",
        hint=_hint(error),
        details={"component": component, "path": str(directory)},
    )


def _hint(error: BaseException) -> str:
    # Both libraries say OSError where a file is not there, cannot be read, or is no sound JSON.
    if isinstance(error, OSError):
        return (
            "the download did not finish, or the daemon's user may not read its files; "
            "check them, or download it again"
        )
    return "its config.json and weights are of different models or versions"


def _check_complete(
    component: str, class_name: str, directory: Path, module: nn.Module, news: dict[str, Any]
) -> None:
    # Both libraries only warn about a weight that no file holds, and go on with a random one.
    on_meta = {name for name, tensor in _tensors(module) if tensor.is_meta}
    missing = sorted(on_meta.union(news.get("missing_keys") or ()))
    if missing:
        raise ModelLoadFailed(
            f"component {component!r}: {directory} lacks {len(missing)} of the weights of "
            f"a {class_name}: {', '.join(missing[:20])}",
            hint="the checkpoint was saved incompletely or is of another model; download it again",
            details={"component": component, "missing": missing},
        )
    if unused := sorted(news.get("unexpected_keys") or ()):
        _log.info("%s holds %d tensors that no layer uses", directory, len(unused))


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
