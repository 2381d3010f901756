"""How `from_pretrained` of transformers builds a model and names and casts what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)

from offloadd.store.index import CheckpointIndex


def load_config(kind: type[Any], directory: Path) -> Any:
    """The configuration as an object of the class that goes with the model's."""
    return kind.config_class.from_pretrained(directory, local_files_only=True)


def without(config: Any, key: str) -> Any:
    """The configuration without one of its settings."""
    less = copy(config)
    delattr(less, key)
    return less


def construct(kind: type[Any], config: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """Call the constructor, and read what belongs to a model that generates text."""
    config.name_or_path = str(directory)
    config.dtype = dtype
    for key in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, key, None)) is not None:
            part.dtype = dtype
    module = kind(config)
    module.tie_weights()
    if module.can_generate() and hasattr(module, "adjust_generation_fn"):
        module.adjust_generation_fn(
            generation_config=None,
            from_auto_class=False,
            from_pipeline=None,
            pretrained_model_name_or_path=str(directory),
            cache_dir=None,
            force_download=False,
            proxies=None,
            local_files_only=True,
            token=None,
            revision=None,
            subfolder="",
            trust_remote_code=False,
        )
    made: nn.Module = module
    return made


def checkpoint_names(module: Any, index: CheckpointIndex) -> dict[str, str] | None:
    """The checkpoint's name of each tensor, by the module's; None if values must be converted."""
    transforms = get_model_conversion_mapping(module)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    if len(renamings) + len(converters) != len(transforms):
        return None
    wanted = module.state_dict()
    prefix = module.base_model_prefix
    names: dict[str, str] = {}
    for there in index.tensors:
        name, converter = rename_source_key(there, renamings, converters, prefix, wanted)
        if name not in wanted and there in wanted:
            name, converter = rename_source_key(there, [], [], prefix, wanted)
        if name not in wanted:
            continue
        if converter is not None or name in names:
            return None
        names[name] = there
    return names


def dtype_rule(
    module: Any, dtype: torch.dtype, stored: Mapping[str, torch.dtype]
) -> Callable[[str, torch.dtype], torch.dtype]:
    """What a tensor is computed in: what the class plans for the wish, else as it was built."""
    plan = module._get_dtype_plan(dtype)
    if not plan:
        return lambda name, built: built
    pattern, by_group, _ = build_glob_alternation(list(plan))

    def rule(name: str, built: torch.dtype) -> torch.dtype:
        match = pattern.search(name)
        found = plan[by_group[match.lastgroup]] if match is not None else built
        chosen: torch.dtype = found
        return chosen

    return rule
