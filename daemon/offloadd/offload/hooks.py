"""Connects a module's own calls to the executor, and takes every trace of that away again.

Promises: arguments and results pass through untouched; an exception in a forward releases what the
forward had acquired; hooks know the executor, never the reverse, so no reference cycle keeps a
model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offloadd.offload.executor import Executor
from offloadd.offload.streamed import Streamed

TURNED_BY_HOOKS = (nn.TransformerEncoderLayer,)
"""Layers that compute in another way, with other numbers, when hooks are on them or inside."""


class Hooks:
    """The hooks of one component."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

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
        while self._undo:
            self._undo.pop()()

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
        if isinstance(module, TURNED_BY_HOOKS):
            self._undo.append(_wrap_forward(module, before, after, always_call=always_call))
            return
        self._undo.append(module.register_forward_pre_hook(before, prepend=True).remove)
        self._undo.append(module.register_forward_hook(after, always_call=always_call).remove)


def _wrap_forward(
    module: nn.Module, before: Any, after: Any, *, always_call: bool
) -> Callable[[], None]:
    """What hooks would do, without any; gives the call that undoes it."""
    itself = weakref.ref(module)
    own = vars(module).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        called = itself()
        assert called is not None  # it is being called
        before(called, args)
        is_done = False
        try:
            result = (
                type(called).forward(called, *args, **kwargs)
                if own is None
                else own(*args, **kwargs)
            )
            is_done = True
        finally:
            if is_done or always_call:
                after(called, args, None)
        return result

    def unwrap() -> None:
        called = itself()
        if called is None:
            return
        if own is None:
            del called.__dict__["forward"]
        else:
            called.__dict__["forward"] = own

    module.__dict__["forward"] = forward
    return unwrap
