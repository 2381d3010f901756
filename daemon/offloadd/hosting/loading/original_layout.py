"""From weights as a model's authors lay them out in one file to those of a component of diffusers.

The conversions are diffusers' own (`diffusers.loaders.single_file_utils`, as its `from_single_file`
chooses among them). Promises: nothing is copied that a conversion only renames, cuts or looks at in
another shape, so that tensors without memory tell where in the file each weight lies; and every
other weight has the bits that `from_single_file` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import single_file_utils as conversions
from diffusers.loaders.single_file_model import (
    SINGLE_FILE_LOADABLE_CLASSES,
    FromOriginalModelMixin,
    _get_single_file_loadable_mapping_class,
    _should_convert_state_dict_to_diffusers,
)
from torch import nn
from torch.overrides import TorchFunctionMode

Tensors = Mapping[str, torch.Tensor]

_STUMBLES = (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError)
"""What the conversions raise for a file of another model, as seen."""


class NotInFile(Exception):
    """The file holds no weights of the component; the text says what a conversion stumbled over."""


def converts(kind: type[Any], tensors: Mapping[str, Any]) -> bool:
    """Whether diffusers knows a conversion for a class, given the names in a file."""
    if issubclass(kind, FromOriginalModelMixin):
        return _get_single_file_loadable_mapping_class(kind) is not None
    is_clip = conversions.is_clip_model_in_single_file(kind, tensors)
    return bool(is_clip or _is_t5(kind, tensors))


def convert(kind: type[Any], module: nn.Module, directory: Path, tensors: Tensors) -> Tensors:
    """The weights of a component whose class `converts`, by their names in `module`.

    The module may be without weights; `directory` holds its configuration. Raises `NotInFile`.
    """
    try:
        with _WithoutCopies():
            made = _conversion(kind, module, directory)(dict(tensors))
    except (*_STUMBLES, conversions.SingleFileComponentError) as error:
        told = " ".join(str(error).split())[:200]
        raise NotInFile(f"{type(error).__name__}: {told}") from error
    wanted = module.state_dict()
    found = {name: one for name, one in made.items() if name in wanted and one is not None}
    if not found:
        raise NotInFile("it has none of its layers")
    return found


def _conversion(
    kind: type[Any], module: nn.Module, directory: Path
) -> Callable[[dict[str, torch.Tensor]], Tensors]:
    if issubclass(kind, FromOriginalModelMixin):
        return lambda tensors: _diffusers_weights(kind, module, directory, tensors)
    if "T5" in kind.__name__:
        return conversions.convert_sd3_t5_checkpoint_to_diffusers  # type: ignore[no-any-return]
    return lambda tensors: _clip_weights(module, tensors)


def _diffusers_weights(
    kind: Any, module: nn.Module, directory: Path, tensors: dict[str, torch.Tensor]
) -> Tensors:
    if not _should_convert_state_dict_to_diffusers(module.state_dict(), tensors):
        return tensors
    name = _get_single_file_loadable_mapping_class(kind)
    mapping: Any = SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
    config = kind.load_config(directory, local_files_only=True)
    made: Tensors = mapping(config=config, checkpoint=tensors)
    return made


def _clip_weights(module: Any, tensors: dict[str, torch.Tensor]) -> Tensors:
    """As `create_diffusers_clip_model_from_ldm` chooses; two encoders are told by their widths."""
    is_wrapped = hasattr(module, "text_model")
    text_model = module.text_model if is_wrapped else module
    width = text_model.embeddings.position_embedding.weight.shape[-1]

    def is_wide(there: bool, key: str) -> bool:
        # The conversions look where such a file has its table of positions.
        return there and tensors[conversions.CHECKPOINT_KEY_NAMES[key]].shape[-1] == width

    ldm, open_clip = conversions.convert_ldm_clip_checkpoint, _from_open_clip
    is_plain = conversions.is_clip_model(tensors)
    if is_plain or is_wide(conversions.is_clip_sdxl_model(tensors), "clip_sdxl"):
        made = ldm(tensors)
    elif is_wide(conversions.is_clip_sd3_model(tensors), "clip_sd3"):
        made = ldm(tensors, "text_encoders.clip_l.transformer.")
        made["text_projection.weight"] = torch.eye(width)
    elif conversions.is_open_clip_model(tensors):
        made = open_clip(module, tensors, "cond_stage_model.model.")
    elif is_wide(conversions.is_open_clip_sdxl_model(tensors), "open_clip_sdxl"):
        made = open_clip(module, tensors, "conditioner.embedders.1.model.")
    elif conversions.is_open_clip_sdxl_refiner_model(tensors):
        made = open_clip(module, tensors, "conditioner.embedders.0.model.")
    elif is_wide(conversions.is_open_clip_sd3_model(tensors), "open_clip_sd3"):
        made = ldm(tensors, "text_encoders.clip_g.transformer.")
    else:
        raise NotInFile(f"it has no text encoder that is {width} wide")
    if is_wrapped:
        return dict(made)
    return {name.removeprefix("text_model."): one for name, one in made.items()}


def _from_open_clip(
    module: nn.Module, tensors: dict[str, torch.Tensor], prefix: str
) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = conversions.convert_open_clip_checkpoint(
        module, tensors, prefix=prefix
    )
    return made


def _is_t5(kind: type[Any], tensors: Mapping[str, Any]) -> bool:
    return "T5" in kind.__name__ and conversions.is_t5_in_single_file(tensors)


class _WithoutCopies(TorchFunctionMode):
    """Lets copies that change nothing be the tensors themselves; in this thread alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.clone:
            return args[0]
        if func is torch.cat and len(args[0]) == 1:
            return args[0][0]
        return func(*args, **(kwargs or {}))
