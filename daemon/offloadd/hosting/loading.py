"""Builds a pipeline from a checked directory, one component at a time, with weights of its own.

Every weight is copied out of its file, into memory that torch aligned: a file that is rewritten or
cut afterwards changes nothing here, and where a weight lay in its file changes no number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.hosting.classes import component_class, pipeline_class
from offloadd.store.index import ComponentFiles, PipelineFiles

_log = logging.getLogger(__name__)

OnComponent = Callable[[int, int], None]
"""Told how many components are loaded, and of how many; may raise to stop."""

# What `from_pretrained` raises for files that do not fit, as seen in diffusers and transformers.
_UNFIT = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError)


def load_pipeline(files: PipelineFiles, dtype: torch.dtype, on_component: OnComponent) -> Any:
    """The pipeline with all components in host memory, ready to compute.

    Raises `ModelLoadFailed` with the component's name; what `on_component` raises passes through.
    """
    components: dict[str, Any] = {}
    for done, component in enumerate(files.components):
        on_component(done, len(files.components))
        components[component.name] = _load_component(component, dtype)
    on_component(len(files.components), len(files.components))
    kind = pipeline_class(files.class_name)
    try:
        # Everything that has files is passed in; this only reads settings and wires the parts.
        return kind.from_pretrained(files.directory, **components, local_files_only=True)
    except _UNFIT as error:
        raise ModelLoadFailed(
            f"the components of {files.directory} do not make a {files.class_name}: {error}",
            hint="model_index.json and the components are of different models or versions",
        ) from error


def modules(pipeline: Any) -> dict[str, nn.Module]:
    """The components that hold weights, by name."""
    return {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
    }


def _load_component(files: ComponentFiles, dtype: torch.dtype) -> Any:
    kind = component_class(files.name, files.library, files.class_name)
    try:
        if files.checkpoint is None:
            return kind.from_pretrained(files.directory, local_files_only=True)
        module, news = kind.from_pretrained(
            files.directory,
            dtype=dtype,
            variant=files.checkpoint.variant,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except _UNFIT as error:
        raise ModelLoadFailed(
            f"component {files.name!r} ({files.class_name}) cannot be built from "
            f"{files.directory}: {_sentence(error)}",
            hint="its config.json and weights are of different models or versions",
            details={"component": files.name, "path": str(files.directory)},
        ) from error
    _check_complete(files, module, news)
    _own_weights(module)
    return module.requires_grad_(False).eval()


def _check_complete(files: ComponentFiles, module: nn.Module, news: dict[str, Any]) -> None:
    # Both libraries only warn about a weight that no file holds, and go on with a random one.
    on_meta = {name for name, tensor in _tensors(module) if tensor.is_meta}
    missing = sorted(on_meta.union(news.get("missing_keys") or ()))
    if missing:
        raise ModelLoadFailed(
            f"component {files.name!r}: {files.directory} lacks {len(missing)} of the weights of "
            f"a {files.class_name}: {', '.join(missing[:20])}",
            hint="the checkpoint was saved incompletely or is of another model; download it again",
            details={"component": files.name, "missing": missing},
        )
    if unused := sorted(news.get("unexpected_keys") or ()):
        _log.info("%s holds %d tensors that no layer uses", files.directory, len(unused))


def _own_weights(module: nn.Module) -> None:
    for _, tensor in _tensors(module):
        tensor.data = tensor.data.clone()


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
