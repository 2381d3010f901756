"""How `from_pretrained` of diffusers builds a model and names and casts what it reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadd.store.index import CheckpointIndex


def load_config(kind: type[Any], directory: Path) -> Any:
    """The configuration as a mapping."""
    return kind.load_config(directory, local_files_only=True)


def without(config: Any, key: str) -> Any:
    """The configuration without one of its settings."""
    return {name: value for name, value in config.items() if name != key}


def construct(kind: type[Any], config: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """Call the constructor."""
    module = kind.from_config(config)
    module.register_to_config(_name_or_path=str(directory))
    made: nn.Module = module
    return made


def checkpoint_names(module: Any, index: CheckpointIndex) -> dict[str, str]:
    """The checkpoint's name of each tensor, by the module's.

    Attention blocks of early models have older names, which diffusers looks for in single files.
    """
    renamed = OrderedDict((name, name) for name in index.tensors)
    if len(index.files) == 1:
        module._fix_state_dict_keys_on_load(renamed)
    wanted = module.state_dict().keys()
    return {name: there for name, there in renamed.items() if name in wanted}


def dtype_rule(
    module: Any, dtype: torch.dtype, stored: Mapping[str, torch.dtype]
) -> Callable[[str, torch.dtype], torch.dtype]:
    """What a tensor is computed in: the wish, or what the class insists on; integers as stored."""
    kept = getattr(type(module), "_keep_in_fp32_modules", None) or []
    kept = [kept] if isinstance(kept, str) else kept

    def rule(name: str, built: torch.dtype) -> torch.dtype:
        there = stored.get(name)
        if there is None or not there.is_floating_point:
            return there or built
        return torch.float32 if any(part in name.split(".") for part in kept) else dtype

    return rule
