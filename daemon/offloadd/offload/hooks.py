"""Connects a module's own calls to the executor, and takes every trace of that away again.

Promises: arguments and results pass through untouched; an exception in a forward releases what the
forward had acquired; hooks know the executor, never the reverse, so no reference cycle keeps a
model alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offloadd.offload.executor import Executor, Streamed


class Hooks:
    """The hooks of one component."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def install(
        self,
        module: nn.Module,
        component: str,
        executor: Executor,
        anchors: Sequence[tuple[nn.Module, Streamed]],
    ) -> None:
        """Acquire at each anchor what it needs; begin and end steps at the root."""
        for anchor, group in anchors:
            self._on_group(anchor, executor, group)
        self._on_root(module, component, executor)

    def remove(self) -> None:
        """Take all hooks away; calls under way end as they began."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_group(self, module: nn.Module, executor: Executor, group: Streamed) -> None:
        def acquire(module: nn.Module, args: Any) -> None:
            executor.acquire(group)

        def release(module: nn.Module, args: Any, result: Any) -> None:
            executor.release(group)

        self._add(module, acquire, release, always_call=True)

    def _on_root(self, module: nn.Module, component: str, executor: Executor) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            executor.enter_root(component)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            executor.leave_root(component)

        # Not always called: a step that raised is no step, and the next one begins anew.
        self._add(module, enter, leave, always_call=False)

    def _add(self, module: nn.Module, before: Any, after: Any, *, always_call: bool) -> None:
        # First of all hooks before the call and last after it: other hooks may read weights.
        # A compiled region ends at them, since what they do is not a computation.
        before = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(after)  # type: ignore[no-untyped-call]
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=always_call))
