"""One module under the engine: its groups, what stays of it on the device, and its hooks.

Promises: an attached module computes through the executor and holds no weight but those that stay;
after `detach` its hooks are gone, every weight is a plain meta parameter, and no memory of the
device is held. The module is referred to weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.offload.absent import Place
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.binding import bind_group
from offloadd.offload.executor import Executor, Streamed
from offloadd.offload.groups import Grouping
from offloadd.offload.hooks import Hooks
from offloadd.offload.host_memory import bytes_of
from offloadd.offload.leftovers import Leftovers, move_buffers
from offloadd.offload.reads import StrayReads
from offloadd.offload.tier import DeviceTier
from offloadd.offload.transfers import DmaLoader, Loader, ReadLoader
from offloadd.store.source import WeightSource


class Component:
    """An attached module; see `attach_component`."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        grouping: Grouping,
        source: WeightSource,
        accelerator: Accelerator,
        tier: DeviceTier,
        executor: Executor,
    ) -> None:
        self.name = name
        self.grouping = grouping
        self.groups: tuple[Streamed, ...] = ()
        self.module = weakref.ref(module)
        self.source = source
        self._accelerator = accelerator
        self._executor = executor
        self._hooks = Hooks()
        self._group_at: dict[Place, Streamed] = {}
        self._unpin: Callable[[], None] | None = None
        itself = weakref.ref(self)

        @contextmanager
        def acquired(place: Place) -> Iterator[torch.Tensor]:
            component = itself()
            if component is None:
                raise RuntimeError(f"the weight at {place} is no longer streamed")
            with component._acquired(place) as weight:
                yield weight

        self.reads = StrayReads(module, accelerator.device, acquired)
        self._leftovers = Leftovers(grouping.layout, tier, self.reads)
        self._loader: Loader | None = None
        self._extent: torch.Tensor | None = None
        self._choose_loader()

    @property
    def in_place(self) -> bool:
        """Whether the module computes on the host's own bytes, so that nothing is streamed."""
        return self._loader is None

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights, gaps between them included."""
        return self.grouping.layout.size_bytes

    @property
    def leftover_bytes(self) -> int:
        """Bytes of small weights that the device keeps for as long as the module is attached."""
        return self._leftovers.size_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes that are on the device now and stay."""
        if self.in_place:
            return self.size_bytes
        return self._leftovers.size_bytes + self._executor.resident_bytes(self.name)

    def regroup(self, grouping: Grouping) -> None:
        """Stream in other groups from now on; no forward of the module may be under way."""
        module = self.module()
        if module is None or self._loader is None:
            return
        self._hooks.remove()
        self._executor.remove(self.name)
        self._leftovers.load(module, grouping.leftovers, self._loader)
        self._start(module, grouping, self._loader)

    def detach(self) -> None:
        """Let the module go."""
        self._hooks.remove()
        self._executor.remove(self.name)
        for group in self.groups:
            group.binding.unbind()
        self._leftovers.unload()
        self._extent = None
        self._let_source_go()

    def _choose_loader(self) -> None:
        """How bytes come, unless they can stay where the host has them."""
        view = self.source.host_view()
        if view is None:
            self._loader = ReadLoader(self.source)
        elif self._accelerator.has_dma:
            self._unpin = self._accelerator.pin(view)
            self._loader = DmaLoader(self._accelerator, bytes_of(view))
        else:
            self._extent = bytes_of(view)

    def _begin(self, module: nn.Module) -> None:
        """Load what stays and take the module over; on an error nothing was changed."""
        grouping = self.grouping
        if self._loader is None:
            self._begin_in_place(module, grouping)
            return
        try:
            self._leftovers.load(module, grouping.leftovers, self._loader)
        except BaseException:
            self._let_source_go()
            raise
        move_buffers(module, grouping.leftovers, self._accelerator.device)
        self._start(module, grouping, self._loader)

    def _begin_in_place(self, module: nn.Module, grouping: Grouping) -> None:
        assert self._extent is not None
        everything = (*grouping.leftovers, *(t for group in grouping.groups for t in group.tensors))
        self._leftovers.use_in_place(module, everything, self._extent)
        self._executor.add(self.name, ())
        self._hooks.install(module, self.name, self._executor, ())

    def _let_source_go(self) -> None:
        if self._unpin is not None:
            self._unpin()
        self.source.release_view()

    def _start(self, module: nn.Module, grouping: Grouping, loader: Loader) -> None:
        self.grouping = grouping
        self.groups = tuple(
            Streamed(
                component=self.name,
                index=group.index,
                name=group.name,
                start_bytes=group.start_bytes,
                stop_bytes=group.stop_bytes,
                binding=bind_group(module, grouping.layout, group, self.reads),
                loader=loader,
            )
            for group in grouping.groups
        )
        for group in self.groups:
            group.binding.absent()
        self._group_at = {
            place: self.groups[group.index]
            for group in grouping.groups
            for tensor in group.tensors
            for place in tensor.places
        }
        anchors = [(path, self.groups[g.index]) for g in grouping.groups for path in g.anchors]
        self._executor.add(self.name, self.groups)
        self._hooks.install(module, self.name, self._executor, anchors)

    @contextmanager
    def _acquired(self, place: Place) -> Iterator[torch.Tensor]:
        """The weight at a place, for code that no hook announces."""
        group = self._group_at[place]
        self._executor.acquire(group)
        try:
            module = self.module()
            assert module is not None  # its own code is running
            path, attribute = place
            yield module.get_submodule(path).get_parameter(attribute)
        finally:
            self._executor.release(group)


def attach_component(
    name: str,
    module: nn.Module,
    grouping: Grouping,
    source: WeightSource,
    accelerator: Accelerator,
    tier: DeviceTier,
    executor: Executor,
) -> Component:
    """Take over a module whose weights (real or on meta) are those that the source gives.

    Parameters that stay are loaded, buffers moved to the device, everything else made absent. Where
    the device's memory is the host's, and the source has the extent there, the module computes on
    the extent itself and nothing is streamed.

    Raises ModelLoadFailed if the source is of another module, OutOfMemory or StorageFailed if what
    stays cannot be loaded; the module is then as it was.
    """
    if source.layout != grouping.layout:
        raise ModelLoadFailed(
            f"the weights for {name!r} are laid out for another module",
            hint="load the model again",
            details={"component": name},
        )
    component = Component(name, module, grouping, source, accelerator, tier, executor)
    component._begin(module)
    return component
