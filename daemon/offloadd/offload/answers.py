"""Makes a module answer `.device` with the execution device while its weights are elsewhere.

Pipelines ask a model for its device and put inputs there; both model libraries look at the first
parameter, which may be absent. A property cannot be overridden on an instance, so the instance gets
a subclass of its class that has the same name and differs in this one answer. `.dtype` needs
nothing: an absent weight keeps its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import nn

_ATTRIBUTE = "_offloadd_execution_device"


def answer_device(module: nn.Module, device: torch.device) -> None:
    """Let the module, and each one inside that has a `device` property, answer this device."""
    for child in module.modules():
        if _ATTRIBUTE not in child.__dict__ and _has_device_property(type(child)):
            child.__class__ = _answering(cast(Hashable, type(child)))
        if _ATTRIBUTE in type(child).__dict__:
            child.__dict__[_ATTRIBUTE] = device


def answer_as_before(module: nn.Module) -> None:
    """Undo `answer_device`."""
    for child in module.modules():
        if child.__dict__.pop(_ATTRIBUTE, None) is not None:
            child.__class__ = type(child).__mro__[1]


def _has_device_property(kind: type) -> bool:
    return isinstance(getattr(kind, "device", None), property)


@functools.cache  # one for each model class in use, and classes stay anyway
def _answering(kind: Any) -> Any:
    def device(self: nn.Module) -> torch.device:
        answer: torch.device = self.__dict__[_ATTRIBUTE]
        return answer

    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        _ATTRIBUTE: None,
        "device": property(device),
    }
    return type(kind.__name__, (kind,), members)
