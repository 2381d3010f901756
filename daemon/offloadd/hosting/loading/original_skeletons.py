"""How `from_single_file` of diffusers builds a model and casts what it reads.

Other than `from_pretrained`, it builds every module in float32 and casts all of it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadd.store.index import CheckpointIndex


class OriginalSkeletons:
    """The same functions as a library's, for a class of that library."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.load_config = library.load_config

    def construct(
        self, kind: type[Any], config: Any, directory: Path, dtype: torch.dtype
    ) -> nn.Module:
        """Call the constructor."""
        made: nn.Module = self._library.construct(kind, config, directory, torch.float32)
        return made

    def checkpoint_names(self, module: nn.Module, index: CheckpointIndex) -> dict[str, str]:
        """The index names them as the module does."""
        wanted = module.state_dict().keys()
        return {name: name for name in index.tensors if name in wanted}

    def dtype_rule(
        self, module: Any, dtype: torch.dtype, stored: Mapping[str, torch.dtype]
    ) -> Callable[[str, torch.dtype], torch.dtype]:
        """All that is floating point takes the dtype, but for what a T5 keeps in float32."""

        def rule(name: str, built: torch.dtype) -> torch.dtype:
            wanted = dtype if built.is_floating_point else built
            return kept(name, wanted) if kept is not None else wanted

        is_t5 = "T5" in type(module).__name__
        kept = self._library.dtype_rule(module, dtype, stored) if is_t5 else None
        return rule
