"""Where a job can stop or give way: the borders of all modules on one device, heard by their job.

Each job runs in a thread of its own, and modules are shared by jobs: a border belongs to the job
whose thread comes to it. The entry of a root module's forward is a whole border, where nothing of
the step has begun; inside an autoencoder, which keeps state of a call on itself (the frames before,
in video), a job may only be stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_DEPTH_IN_AUTOENCODER = 3


class Borders:
    """Hands each border to the listeners of the thread that came to it."""

    def __init__(self) -> None:
        self._own = threading.local()

    @contextmanager
    def heard(self, at_root: Callable[[], None], inside: Callable[[], None]) -> Iterator[None]:
        """Call `at_root` and `inside` at this thread's borders; either may raise."""
        before = getattr(self._own, "listeners", None)
        self._own.listeners = (at_root, inside)
        try:
            yield
        finally:
            self._own.listeners = before

    def at_root(self, component: str) -> None:
        """A root module's forward is entered; listens to `Engine.on_border`."""
        listeners = getattr(self._own, "listeners", None)
        if listeners is not None:
            listeners[0]()

    def watch_inside(self, component: nn.Module) -> list[Callable[[], None]]:
        """Make the inner modules of an autoencoder borders; gives the calls that undo it."""
        return [
            module.register_forward_pre_hook(self._inside).remove for module in _bordered(component)
        ]

    def _inside(self, module: nn.Module, arguments: Any) -> None:
        listeners = getattr(self._own, "listeners", None)
        if listeners is not None:
            listeners[1]()


def _bordered(component: nn.Module) -> list[nn.Module]:
    if not hasattr(component, "decode"):
        return []
    return [
        module
        for name, module in component.named_modules()
        if name and name.count(".") < _DEPTH_IN_AUTOENCODER
    ]
