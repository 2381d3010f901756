"""Modules without weights: parameters on meta, buffers and plain tensors real, dtypes as computed.

Promises: what is built here equals what `from_pretrained` of the same class builds, but for the
weights, which stay away until somebody brings them. Of a class that loads in a way of its own this
is checked when its `from_pretrained` has loaded it, in the process that writes packs. What cannot
be built from a configuration at all is refused; `NotReproducible` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn
from transformers import PreTrainedModel

from offloadd.channel.specs import QuantizationSpec
from offloadd.hosting.loading import diffusers_skeletons, transformers_skeletons
from offloadd.hosting.loading.original_skeletons import OriginalSkeletons
from offloadd.hosting.loading.stand_ins import loads_in_its_own_way
from offloadd.hosting.quantization.gguf_files import blank_from_gguf, is_gguf
from offloadd.hosting.quantization.library import quantise_blank, settings_for
from offloadd.offload.weights.forms import DTYPES
from offloadd.store.index import CheckpointIndex

_QUANTIZATION = "quantization_config"
_LIBRARIES: tuple[tuple[type[Any], Any], ...] = (
    (ModelMixin, diffusers_skeletons),
    (PreTrainedModel, transformers_skeletons),
)


class NotReproducible(Exception):
    """Modules of the class cannot be built without their weights; the text says why."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A module in evaluation mode with its parameters on meta.

    `names` gives, for each tensor of the module that the checkpoint holds, the checkpoint's name;
    None if values have to be converted on the way, or may be: then they are what the class's own
    `from_pretrained` gives, and so are its buffers, some of which may be on meta. `quantised`
    counts the weights that are; their values are converted on the way.
    """

    module: nn.Module
    names: Mapping[str, str] | None
    quantised: int = 0


def build_skeleton(
    kind: type[Any],
    directory: Path,
    index: CheckpointIndex,
    dtype: torch.dtype,
    quantization: QuantizationSpec | None = None,
) -> Skeleton:
    """Build a class of diffusers or transformers from its configuration.

    With a quantization its weights are those that quantising leaves, where it has any to quantise.
    Raises `NotReproducible`, and whatever the configuration makes the constructor raise.
    """
    if is_gguf(index.location):
        return _from_gguf(kind, directory, index, dtype)
    library = library_of(kind)
    if index.is_original:
        library = OriginalSkeletons(library)
    config = library.load_config(kind, directory)
    saved = config_value(config, _QUANTIZATION)
    if saved is not None:
        config = library.without(config, _QUANTIZATION)
    built_in = torch.float32 if index.is_original else dtype
    with torch.random.fork_rng(devices=[]), _default_dtype(built_in), parameters_on_meta():
        module = library.construct(kind, config, directory, dtype)
    names = library.checkpoint_names(module, index)
    stored = {
        name: DTYPES[index.tensors[there].spec.dtype] for name, there in (names or {}).items()
    }
    rule = library.dtype_rule(module, dtype, stored)
    _set_dtypes(module, rule)
    for name, buffer in list(module.named_buffers()):
        is_cast = name in stored or index.is_original
        if is_cast and rule(name, buffer.dtype) != buffer.dtype:
            path, _, attribute = name.rpartition(".")
            module.get_submodule(path)._buffers[attribute] = buffer.to(rule(name, buffer.dtype))
    # A buffer on meta is one that the constructor computes from weights.
    needs_loading = any(one.is_meta for one in module.buffers())
    if needs_loading and index.is_original:
        raise NotReproducible(f"{kind.__name__} computes buffers from weights as it loads them")
    needs_loading = needs_loading or (loads_in_its_own_way(kind) and not index.is_original)
    quantised = _quantise(kind, module, saved, quantization)
    if quantization is not None and not quantised:
        # Asking has marked the module as a quantised one.
        return build_skeleton(kind, directory, index, dtype)
    return Skeleton(module.eval(), None if needs_loading or quantised else names, quantised)


def quantised_skeleton(
    kind: type[Any],
    directory: Path,
    index: CheckpointIndex,
    dtype: torch.dtype,
    quantization: QuantizationSpec | None,
) -> Skeleton:
    """What `build_skeleton` gives, with buffers on meta too: for sizes alone.

    Nothing of the process is changed, so that other threads may compute meanwhile. Raises as
    `build_skeleton` does, and what a constructor raises that cannot do without values.
    """
    library = library_of(kind)
    config = library.load_config(kind, directory)
    saved = config_value(config, _QUANTIZATION)
    if saved is not None:
        config = library.without(config, _QUANTIZATION)
    with torch.device("meta"):
        module = library.construct(kind, config, directory, torch.float32)
    names = library.checkpoint_names(module, index) or {}
    there = {name: DTYPES[index.tensors[one].spec.dtype] for name, one in names.items()}
    cast = library.dtype_rule(module, dtype, there)
    _set_dtypes(module, lambda name, built: cast(name, dtype))
    return Skeleton(module, None, _quantise(kind, module, saved, quantization))


def _from_gguf(
    kind: type[Any], directory: Path, index: CheckpointIndex, dtype: torch.dtype
) -> Skeleton:
    if not hasattr(kind, "from_single_file"):
        raise NotReproducible(f"diffusers loads no {kind.__name__} from a GGUF file")
    return Skeleton(
        blank_from_gguf(kind, directory, index, dtype), None, quantised=len(index.metadata)
    )


def _quantise(
    kind: type[Any], module: nn.Module, saved: Any, quantization: QuantizationSpec | None
) -> int:
    """Quantise as the configuration says, or as is asked for; says how many weights."""
    if saved is None and quantization is None:
        return 0
    settings = saved if quantization is None else settings_for(kind, quantization)
    return quantise_blank(module, settings, is_stored=saved is not None)


def blank_module(kind: type[Any], directory: Path) -> nn.Module:
    """A module of the class without any memory, for its names and shapes.

    Other threads may compute meanwhile. Raises as `build_skeleton` does.
    """
    library = library_of(kind)
    config = library.load_config(kind, directory)
    with torch.device("meta"):
        made: nn.Module = library.construct(kind, config, directory, torch.float32)
    return made


def config_value(config: Any, key: str) -> Any:
    """A setting of a configuration, be it a mapping (diffusers) or an object (transformers)."""
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let every parameter that is registered in this block be on meta, whoever registers it.

    The patch is the whole process's while the block lasts: one thread builds models. A parameter
    that is on meta already stays the same object, so that ties hold.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        held = self._parameters[name]
        if held is not None and not held.is_meta:
            blank = nn.Parameter(held.detach().to("meta"), requires_grad=held.requires_grad)
            blank.__dict__.update(held.__dict__)
            # transformers gives no values to a weight that says it has some: there is no memory
            # here, and trying to costs 2 ms for each.
            blank.__dict__["_is_hf_initialized"] = True
            self._parameters[name] = blank

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def library_of(kind: type[Any]) -> Any:
    """How the library of a class builds it; raises `NotReproducible` for other classes."""
    for base, library in _LIBRARIES:
        if issubclass(kind, base):
            return library
    raise NotReproducible(f"{kind.__name__} is no model class of diffusers or transformers")


def _set_dtypes(module: nn.Module, rule: Callable[[str, torch.dtype], torch.dtype]) -> None:
    """Give each parameter the dtype of the rule; tied parameters stay one object."""
    changed: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in changed:
                name = f"{path}.{attribute}" if path else attribute
                dtype = rule(name, parameter.dtype)
                changed[id(parameter)] = parameter
                if dtype != parameter.dtype:
                    blank = torch.empty_strided(
                        parameter.shape, parameter.stride(), dtype=dtype, device="meta"
                    )
                    is_real = parameter.requires_grad and dtype.is_floating_point
                    other = nn.Parameter(blank, requires_grad=is_real)
                    # By the new one's id too: it comes up again where the module is shared.
                    changed[id(parameter)] = changed[id(other)] = other
            owner._parameters[attribute] = changed[id(parameter)]
