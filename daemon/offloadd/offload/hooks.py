"""Connects a module's own calls to the executor, and takes every trace of that away again.

Promises: arguments and results pass through untouched; an exception in a forward releases what the
forward had acquired; hooks know the executor, never the reverse, so no reference cycle keeps a
model alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offloadd.offload.streaming.executor import Executor
from offloadd.offload.streaming.streamed import Streamed

TURNED_BY_HOOKS = (nn.TransformerEncoderLayer,)
"""Layers that compute in another way, with other numbers, when hooks are on them or inside."""


class _Anchored:
    """Which groups each module needs now, and what calls under way have acquired.

    A call looks both up when it needs them: at a root's entry threads may wait for their turn, and
    meanwhile the component may be grouped anew, of which their call's own hooks know nothing.
    """

    def __init__(self, executor: Executor) -> None:
        self.groups: dict[int, tuple[Streamed, ...]] = {}
        self._executor = executor
        self._threads = threading.local()

    def acquire(self, module: nn.Module) -> None:
        acquired: list[Streamed] = []
        # Noted first: what was acquired before one failed is released as well.
        self._calls().append((id(module), acquired))
        for group in self.groups.get(id(module), ()):
            self._executor.acquire(group)
            acquired.append(group)

    def release(self, module: nn.Module) -> None:
        """Release what this thread's call of the module has acquired; nothing if it never did."""
        calls = self._calls()
        if calls and calls[-1][0] == id(module):
            for group in reversed(calls.pop()[1]):
                self._executor.release(group)

    def forget_calls(self) -> None:
        """This thread is in no call; one that ended without its hooks has left its notes."""
        self._calls().clear()

    def _calls(self) -> list[tuple[int, list[Streamed]]]:
        calls: list[tuple[int, list[Streamed]]] = self._threads.__dict__.setdefault("calls", [])
        return calls


class Hooks:
    """The hooks of one component."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._anchored: _Anchored | None = None

    def install(
        self,
        module: nn.Module,
        component: str,
        executor: Executor,
        anchors: Sequence[tuple[nn.Module, Streamed]],
    ) -> None:
        """Acquire at each anchor what it needs; begin and end steps at the root."""
        anchored = self._anchored = self._anchored or _Anchored(executor)
        modules = {id(anchor): anchor for anchor, _ in anchors} | {id(module): module}
        for place, anchor in modules.items():
            anchored.groups[place] = tuple(group for other, group in anchors if other is anchor)
            self._on_groups(anchor, anchored)
        self._on_root(module, component, executor, anchored)

    def remove(self) -> None:
        """Take all hooks away; calls under way end as they began."""
        while self._undo:
            self._undo.pop()()
        if self._anchored is not None:
            self._anchored.groups.clear()

    def _on_groups(self, module: nn.Module, anchored: _Anchored) -> None:
        def acquire(module: nn.Module, args: Any) -> None:
            anchored.acquire(module)

        def release(module: nn.Module, args: Any, result: Any) -> None:
            anchored.release(module)

        self._add(module, acquire, release, always_call=True)

    def _on_root(
        self, module: nn.Module, component: str, executor: Executor, anchored: _Anchored
    ) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            anchored.forget_calls()
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
        is_done = False
        try:
            before(called, args)
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
