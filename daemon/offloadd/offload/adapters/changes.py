"""Changes the adapters of hosted components, and plans again when that changes what stays.

Promises: a change that fails leaves modules, memory and plans as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from offload_protocol.errors import InvalidRequest
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.adapters.adapters import rolled_back
from offloadd.offload.adapters.fusing import Fused, fuse_adapters
from offloadd.offload.planning.planning import Planning, Terms
from offloadd.offload.streaming.executor import Executor
from offloadd.offload.streaming.tier import DeviceTier


class AdapterChanges:
    """The adapters of an engine's components; `terms` says what a component may plan with."""

    def __init__(
        self,
        accelerator: Accelerator,
        tier: DeviceTier,
        executor: Executor,
        plannings: Mapping[str, Planning],
        terms: Callable[[str], Terms],
    ) -> None:
        self._accelerator = accelerator
        self._tier = tier
        self._executor = executor
        self._plannings = plannings
        self._terms = terms
        self._fused: dict[str, Fused] = {}

    @contextmanager
    def changing(self, *names: str) -> Iterator[None]:
        """See `Engine.changing_adapters`."""
        plannings = [self._plannings[name] for name in names]
        modules = [module for p in plannings if (module := p.component.module()) is not None]
        for planning in plannings:
            if planning.component.derived is not None:
                raise InvalidRequest(
                    f"the adapters of {planning.component.name!r} are fused", hint="unfuse first"
                )
        try:
            with rolled_back(modules):
                yield
                for name in names:
                    self._fit(name)
        except BaseException:
            for name in names:
                self._fit(name)
            raise

    def fuse(
        self, name: str, adapter_names: Sequence[str] | None, scale: float, *, safe: bool
    ) -> None:
        """See `Engine.fuse`."""
        planning = self._plannings[name]
        fused = fuse_adapters(
            planning.component, self._accelerator, adapter_names, scale, safe=safe
        )
        try:
            planning.component.exchange(fused.source)
        except BaseException:
            fused.undo()
            raise
        self._fused[name] = fused
        try:
            self._fit(name)
            planning.refit(self._terms(name))
        except BaseException:
            self.unfuse(name)
            raise

    def unfuse(self, name: str) -> None:
        """See `Engine.unfuse`."""
        fused = self._fused.get(name)
        if fused is None:
            return
        planning = self._plannings[name]
        planning.component.exchange(None)
        del self._fused[name]
        fused.undo()
        planning.refit(self._terms(name))

    def forget(self, name: str) -> None:
        """Let a component go that is detached already."""
        fused = self._fused.pop(name, None)
        if fused is not None:
            fused.undo()

    def _fit(self, name: str) -> None:
        """Give back what adapters do not need any more, and find room for what they bring."""
        planning = self._plannings[name]
        component, module = planning.component, planning.component.module()
        if module is None:
            return
        own = component.own()
        freed_bytes = component.adapters.sweep(module, own)
        more_bytes = component.adapters.missing_bytes(module, own)
        if freed_bytes or more_bytes > self._tier.room_bytes:
            planning.refit(self._terms(name), more_bytes)
            self._executor.make_room(more_bytes, name)
        component.adapters.take(module, own)
