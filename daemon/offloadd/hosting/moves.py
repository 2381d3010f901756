"""Counts the bytes of weights that offloading copies to the device, where they are copied.

Between two places in one host memory nothing is copied, and nothing is counted; what rests on disk
is read each time, on a CPU as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from offloadd.hosting.group_hooks import groups


class MoveCounter:
    """Bytes copied since the last `reset`."""

    def __init__(self) -> None:
        self.moved_bytes = 0

    def reset(self) -> None:
        self.moved_bytes = 0

    def count_groups(self, module: nn.Module) -> None:
        """Count what the groups of this module bring in."""
        for group in groups(module):
            tensors = [*group.parameters, *group.buffers]
            for member in group.modules:
                tensors += [*member.parameters(), *member.buffers()]
            self._count_call(group, "onload_", _bytes_of(tensors))

    def count_model(self, hook: Any, module: nn.Module, device: torch.device) -> None:
        """Count what accelerate's hook for a whole model brings in, if it is not there yet."""

        def missing_bytes() -> int:
            tensors = [*module.parameters(), *module.buffers()]
            return sum(one.nbytes for one in tensors if one.device != device)

        self._count_each_call(hook, "pre_forward", missing_bytes)

    def count_sequential(self, module: nn.Module) -> None:
        """Count what accelerate's hooks for single layers bring in."""
        for layer in module.modules():
            hook = getattr(layer, "_hf_hook", None)
            if hook is not None:
                tensors = layer.parameters(recurse=False)
                self._count_call(hook, "pre_forward", _bytes_of(tensors))

    def _count_call(self, owner: Any, method: str, size_bytes: int) -> None:
        self._count_each_call(owner, method, lambda: size_bytes)

    def _count_each_call(self, owner: Any, method: str, size_bytes: Callable[[], int]) -> None:
        original = getattr(owner, method)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.moved_bytes += size_bytes()
            return original(*arguments, **keywords)

        setattr(owner, method, counted)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum({id(one): one.nbytes for one in tensors}.values())
