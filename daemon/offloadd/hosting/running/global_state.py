"""What a job changes beside its own objects: random generators of the process, settings of modules.

Both belong to the job that has the turn. They are taken with it when it gives way and put back when
it goes on, so that jobs in between neither see them nor change them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

_ADAPTER_SETTINGS = ("_active_adapter", "_disable_adapters")
_SEEDS_OF_NUMPY = 1 << 32


@dataclass(frozen=True, slots=True)
class Randomness:
    """The states of all generators that code may draw from without naming one."""

    cpu: torch.Tensor
    device: torch.Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def now(cls, device: torch.device) -> Randomness:
        """As it is."""
        return cls(
            torch.get_rng_state(),
            None if device.type == "cpu" else _module(device).get_rng_state(device),
            np.random.get_state(),
            random.getstate(),
        )

    def restore(self, device: torch.device) -> None:
        """Draw on from here."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            _module(device).set_rng_state(self.device, device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def seed_all(seed: int) -> None:
    """Let every draw without a generator follow from the seed."""
    torch.manual_seed(seed)
    np.random.seed(seed % _SEEDS_OF_NUMPY)
    random.seed(seed)


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """Attention processors and adapter settings of some modules, which calls change for a while.

    Diffusers scales adapters around a call, and some pipelines exchange attention processors.
    """

    processors: tuple[tuple[nn.Module, Any], ...]
    adapters: tuple[tuple[nn.Module, dict[str, Any], dict[str, Any]], ...]

    @classmethod
    def of(cls, roots: Iterable[nn.Module]) -> ModuleSettings:
        """The settings now."""
        processors, adapters = [], []
        for root in roots:
            for module in root.modules():
                members = vars(module)
                if "processor" in members or "processor" in module._modules:
                    processors.append((module, module.processor))
                if "_active_adapter" in members:
                    plain = {name: members[name] for name in _ADAPTER_SETTINGS if name in members}
                    adapters.append((module, plain, dict(members.get("scaling", {}))))
        return cls(tuple(processors), tuple(adapters))

    def restore(self) -> None:
        """Set them again, where anything differs."""
        for module, processor in self.processors:
            if module.processor is not processor:
                if isinstance(module._modules.get("processor"), nn.Module):
                    del module._modules["processor"]
                module.processor = processor
        for module, plain, scaling in self.adapters:
            vars(module).update(plain)
            present = vars(module).get("scaling")
            if present is not None:
                # Adapters that came since keep their scale; those that left stay away.
                present.update({name: one for name, one in scaling.items() if name in present})


class OwnSettings:
    """The settings of one job whose call changes them, while others use the same modules between.

    Only whoever has the device calls this; `on_exchange` is told when settings were exchanged.
    """

    def __init__(self, roots: Sequence[nn.Module], on_exchange: Callable[[], None]) -> None:
        self._roots = roots
        self._on_exchange = on_exchange
        self._before: ModuleSettings | None = None
        self._own: ModuleSettings | None = None

    def put_away(self) -> None:
        """Let the modules be as the job has found them, until `put_back`."""
        self._own = ModuleSettings.of(self._roots)
        self.give_up()

    def give_up(self) -> None:
        """Let the modules be as the job has found them, for good."""
        assert self._before is not None  # it had the device
        self._before.restore()
        self._on_exchange()

    def put_back(self) -> None:
        """Let the modules be as the job has left them; the first time it finds them as they are."""
        if self._own is None:
            self._before = ModuleSettings.of(self._roots)
        else:
            self._own.restore()
            self._on_exchange()


def keeps_steps_in_modules(roots: Iterable[nn.Module]) -> bool:
    """Whether hooks of diffusers (caches between steps) keep state of one call in the modules."""
    for root in roots:
        for module in root.modules():
            registry = vars(module).get("_diffusers_hook")
            if registry is not None and getattr(registry, "hooks", None):
                return True
    return False


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
