"""Lets a pipeline change a hosted component's dtype, as a plain module's `to` would.

Many pipelines compute their autoencoder in float32 for a moment (`vae.to(torch.float32)`, decode,
`vae.to(torch.float16)`). Promises: the numbers are those of the plain module; the weights stay
where and as they are stored and are converted for each use, so that no second copy is made;
`restore` brings the first dtype back after a job that ended in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Recast = Callable[[nn.Module, torch.dtype], None]
"""Takes a module off the engine, changes its dtype, and puts it on again."""


class Recasting:
    """The `to` of one hosted module."""

    def __init__(self, module: nn.Module, recast: Recast) -> None:
        self._module = weakref.ref(module)
        self._recast = recast
        self._first = _dtype(module)
        # On the object itself, where a module's call looks before its class.
        module.__dict__["to"] = self._to

    def restore(self) -> None:
        """Compute in the first dtype again, if a job left another behind."""
        if self._first is not None:
            self._to(self._first)

    def remove(self) -> None:
        """Leave the module with the method of its class, in its first dtype; it has no weights."""
        module = self._module()
        if module is not None:
            module.__dict__.pop("to", None)
            if self._first is not None and _dtype(module) != self._first:
                module.to(self._first)

    def _to(self, *args: Any, **kwargs: Any) -> nn.Module:
        module = self._module()
        assert module is not None  # it is being called
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        # Where it is on a device, and how it lies there, is the engine's.
        if dtype is not None and dtype != _dtype(module):
            self._recast(module, dtype)
        return module


def _dtype(module: nn.Module) -> torch.dtype | None:
    return next((one.dtype for one in module.parameters() if one.is_floating_point()), None)
