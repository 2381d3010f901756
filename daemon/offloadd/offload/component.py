"""One module under the engine: its groups, what stays of it on the device, and its hooks.

Promises: an attached module computes through the executor and holds no weight but those that stay;
after `detach` its hooks are gone, every weight is a plain meta parameter, and no memory of the
device is held. The module is referred to weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed, OffloadError
from offloadd.offload.absent import Place
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.adapters import AdapterMemory, Own
from offloadd.offload.binding import Binding, bind_group
from offloadd.offload.casting import Casting, round_buffers
from offloadd.offload.executor import Executor, Streamed
from offloadd.offload.grouping import Group, Grouping, TensorRef
from offloadd.offload.held import HeldLoader
from offloadd.offload.hooks import Hooks
from offloadd.offload.host_memory import bytes_of, view_of
from offloadd.offload.leftovers import Leftovers, move_buffers
from offloadd.offload.reads import StrayReads
from offloadd.offload.scratch import Scratch
from offloadd.offload.staging import StagedLoader, Staging
from offloadd.offload.tier import DeviceTier
from offloadd.offload.transfers import DmaLoader, Loader, ReadLoader
from offloadd.store.derived_source import DerivedSource
from offloadd.store.source import PageLocking, WeightSource


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
        staging: Staging,
    ) -> None:
        self.name = name
        self.grouping = grouping
        self.groups: tuple[Streamed, ...] = ()
        self.module = weakref.ref(module)
        self.source = source
        # Adapters wrap layers, and then paths lead elsewhere: the objects are what stays.
        self._paths = {
            path: weakref.ref(child) for path, child in module.named_modules(remove_duplicate=False)
        }
        self._accelerator = accelerator
        self._executor = executor
        self._scratch = Scratch(tier)
        self.adapters = AdapterMemory(tier)
        self.derived: DerivedSource | None = None
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
        self._choose_loader(staging)

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
        """Bytes that the device keeps for as long as the module is attached, whatever the plan.

        Small weights, scratch memory to convert weights in, and adapters.
        """
        return self._leftovers.size_bytes + self._scratch.size_bytes + self.adapters.size_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes that are on the device now and stay."""
        if self.in_place:
            return self.size_bytes
        return self.leftover_bytes + self._executor.resident_bytes(self.name)

    def modules(self) -> dict[str, nn.Module]:
        """The modules that are still there, by the paths that they had when they were attached."""
        return {path: child for path, ref in self._paths.items() if (child := ref()) is not None}

    def tensors(self) -> Iterator[TensorRef]:
        """Every weight and buffer that was taken over, once."""
        yield from self.grouping.leftovers
        for group in self.grouping.groups:
            yield from group.tensors

    def own(self) -> Own:
        """The places of everything that was taken over; all else in the module is an adapter's."""
        modules = self.modules()
        places = (place for tensor in self.tensors() for place in tensor.places)
        return {(id(modules[path]), name) for path, name in places if path in modules}

    @contextmanager
    def present(self, tensor: TensorRef) -> Iterator[torch.Tensor]:
        """The real weight, wherever it is now; raises StorageFailed or OutOfMemory."""
        path, attribute = tensor.places[0]
        if (path, attribute) in self._group_at:
            with self._acquired((path, attribute)) as weight:
                yield weight
        else:
            holder = self.modules()[path]
            yield holder.get_parameter(attribute)

    def exchange(self, derived: DerivedSource | None) -> None:
        """Compute with derived weights from now on, or (None) with the source's own again.

        Groups are all absent afterwards. Raises StorageFailed, changing nothing, if what stays on
        the device cannot be read.
        """
        if self.module() is None:
            return
        before, self.derived = self.derived, derived
        try:
            fresh = [
                (tensor, self._stored(tensor))
                for tensor in self._staying()
                if any(one and one.derived(*self._range(tensor)) for one in (before, derived))
            ]
        except BaseException:
            self.derived = before
            raise
        self._hooks.remove()
        self._executor.remove(self.name)
        for tensor, stored in fresh:
            self._leftovers.exchange(self.modules(), tensor, stored)
        if self._loader is None:
            self._hold(self.grouping)
        else:
            self._start(self.grouping, self._loader)

    def regroup(self, grouping: Grouping) -> None:
        """Stream in other groups from now on; no forward of the module may be under way.

        Raises OutOfMemory or StorageFailed if what is to stay cannot be loaded; then the groups
        are as before, all absent.
        """
        if self.module() is None or self._loader is None:
            return
        self._hooks.remove()
        self._executor.remove(self.name)
        try:
            self._leftovers.load(self.modules(), grouping.leftovers, self._loader)
            self._scratch.reserve(grouping.scratch_bytes)
        except OffloadError:
            self._start(self.grouping, self._loader)
            raise
        self._start(grouping, self._loader)

    def detach(self) -> None:
        """Let the module go."""
        self._hooks.remove()
        self._executor.remove(self.name)
        for group in self.groups:
            group.binding.unbind()
        self.adapters.close(self.module(), self.own())
        self._leftovers.unload()
        self._scratch.close()
        self._extent = None
        self._let_source_go()

    def _choose_loader(self, staging: Staging) -> None:
        """How bytes come, unless they can stay where the host has them."""
        view = self.source.host_view()
        if view is None and self._accelerator.has_dma:
            self._loader = StagedLoader(self._accelerator, self.source, staging)
        elif view is None:
            self._loader = ReadLoader(self.source)
        elif self._accelerator.has_dma:
            borders: tuple[int, ...] = ()
            if isinstance(self.source, PageLocking):
                borders = self.source.pin_borders
            else:
                self._unpin = self._accelerator.pin(view)
            self._loader = DmaLoader(self._accelerator, bytes_of(view), borders)
        else:
            self._extent = bytes_of(view)

    def _begin(self) -> None:
        """Load what stays and take the module over; on an error nothing was changed."""
        grouping = self.grouping
        try:
            self._scratch.reserve(grouping.scratch_bytes)
            if self._loader is None:
                self._begin_in_place(grouping)
                return
            self._leftovers.load(self.modules(), grouping.leftovers, self._loader)
        except BaseException:
            self._scratch.close()
            self._let_source_go()
            raise
        move_buffers(self.modules(), grouping.leftovers, self._accelerator.device)
        self._start(grouping, self._loader)

    def _begin_in_place(self, grouping: Grouping) -> None:
        """Bind to the host's bytes once and for all what needs no converting."""
        assert self._extent is not None
        self._leftovers.use_in_place(self.modules(), self._staying(), self._extent)
        self._hold(grouping)

    def _hold(self, grouping: Grouping) -> None:
        converted = [group for group in grouping.groups if group.converted_bytes]
        held = [self._held(index, group) for index, group in enumerate(converted)]
        self._follow(grouping, list(zip(converted, held, strict=True)))

    def _held(self, index: int, group: Group) -> Streamed:
        """A group whose bytes stay where the host has them, and take nothing of the device."""
        held = self._in_memory(group.start_bytes, group.stop_bytes)
        return Streamed(
            component=self.name,
            index=index,
            name=group.name,
            start_bytes=group.start_bytes,
            stop_bytes=group.start_bytes,
            binding=self._binding(group, held),
            loader=HeldLoader(),
            keep=True,
        )

    def _staying(self) -> list[TensorRef]:
        """The weights that are bound for as long as the module is attached."""
        groups = self.grouping.groups if self.in_place else ()
        plain = [t for group in groups if not group.converted_bytes for t in group.tensors]
        weights = [t for t in self.grouping.leftovers if t.kind == "parameter"]
        return weights + plain

    def _range(self, tensor: TensorRef) -> tuple[int, int]:
        slot = self.grouping.layout.slots()[tensor.spec.name]
        return slot.offset_bytes, slot.stop_bytes

    def _in_memory(self, start_bytes: int, stop_bytes: int) -> torch.Tensor | None:
        """A range of the extent, derived or not, where the host has it."""
        view = self.derived.derived(start_bytes, stop_bytes) if self.derived else None
        if view is not None:
            return bytes_of(view)
        return None if self._extent is None else self._extent[start_bytes:stop_bytes]

    def _stored(self, tensor: TensorRef) -> torch.Tensor:
        start_bytes, stop_bytes = self._range(tensor)
        stored = self._in_memory(start_bytes, stop_bytes)
        if stored is None:
            stored = torch.empty(stop_bytes - start_bytes, dtype=torch.uint8)
            self.source.read(start_bytes, stop_bytes, view_of(stored)).result()
        return stored

    def _binding(self, group: Group, held: torch.Tensor | None = None) -> Binding:
        layout = self.grouping.layout
        return bind_group(self.modules(), layout, group, self.reads, self._scratch, held)

    def _let_source_go(self) -> None:
        if self._unpin is not None:
            self._unpin()
        self.source.release_view()

    def _start(self, grouping: Grouping, loader: Loader) -> None:
        streamed = [self._streamed(group, loader) for group in grouping.groups]
        self._follow(grouping, list(zip(grouping.groups, streamed, strict=True)))

    def _streamed(self, group: Group, loader: Loader) -> Streamed:
        start_bytes, stop_bytes = group.start_bytes, group.stop_bytes
        view = self.derived.derived(start_bytes, stop_bytes) if self.derived else None
        if view is not None and self.derived is not None:
            if self._accelerator.has_dma:
                loader = DmaLoader(self._accelerator, bytes_of(view))
                start_bytes, stop_bytes = 0, group.size_bytes
            else:
                loader = ReadLoader(self.derived)
        return Streamed(
            component=self.name,
            index=group.index,
            name=group.name,
            start_bytes=start_bytes,
            stop_bytes=stop_bytes,
            binding=self._binding(group),
            loader=loader,
        )

    def _follow(self, grouping: Grouping, brought: Sequence[tuple[Group, Streamed]]) -> None:
        """Let the executor bring these groups, all or some of the grouping's."""
        module = self.module()
        assert module is not None  # whoever attaches or regroups holds it
        self.grouping = grouping
        self.groups = tuple(streamed for _, streamed in brought)
        for streamed in self.groups:
            streamed.binding.absent()
        self._group_at = {
            place: streamed
            for group, streamed in brought
            for tensor in group.tensors
            for place in tensor.places
        }
        modules = self.modules()
        anchors = [
            (modules[path], streamed) for group, streamed in brought for path in group.anchors
        ]
        self._executor.add(self.name, self.groups)
        self._hooks.install(module, self.name, self._executor, anchors)

    @contextmanager
    def _acquired(self, place: Place) -> Iterator[torch.Tensor]:
        """The weight at a place, for code that no hook announces."""
        group = self._group_at[place]
        self._executor.acquire(group)
        try:
            path, attribute = place
            holder = self._paths[path]()
            assert holder is not None  # its weight is being read
            weight = holder._parameters[attribute]
            assert weight is not None  # groups bind no empty place
            yield weight
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
    casting: Casting | None = None,
    staging: Staging | None = None,
) -> Component:
    """Take over a module whose weights (real or on meta) are those that the source gives.

    Parameters that stay are loaded, buffers moved to the device, everything else made absent. Where
    the device's memory is the host's, and the source has the extent there, the module computes on
    the extent itself and nothing is streamed. `casting` is that of the grouping; `staging` is what
    components share whose bytes come from disk to a device with DMA.

    Raises ModelLoadFailed if the source is of another module, OutOfMemory or StorageFailed if what
    stays cannot be loaded; the module is then as it was.
    """
    if source.layout != grouping.layout:
        raise ModelLoadFailed(
            f"the weights for {name!r} are laid out for another module",
            hint="load the model again",
            details={"component": name},
        )
    component = Component(
        name,
        module,
        grouping,
        source,
        accelerator,
        tier,
        executor,
        staging or Staging(accelerator),
    )
    component._begin()
    if casting is not None:
        round_buffers(module, casting)
    return component
