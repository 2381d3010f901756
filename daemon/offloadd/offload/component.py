"""One module under the engine: its groups, what stays of it on the device, and its hooks.

Promises: an attached module computes through the executor and holds no weight but those that stay;
after `detach` its hooks are gone, every weight is a plain meta parameter, and no memory of the
device is held. The module is referred to weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed, OffloadError
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.adapters.adapters import AdapterMemory, Own
from offloadd.offload.grouping.grouping import Grouping, TensorRef
from offloadd.offload.grouping.leftovers import Leftovers, move_buffers
from offloadd.offload.hooks import Hooks
from offloadd.offload.streaming.executor import Executor
from offloadd.offload.streaming.reads import StrayReads
from offloadd.offload.streaming.staging import Staging
from offloadd.offload.streaming.streamed import Streamed
from offloadd.offload.streaming.streamed_groups import streamed_groups
from offloadd.offload.streaming.supply import Supply
from offloadd.offload.streaming.tier import DeviceTier
from offloadd.offload.weights.absent import Place
from offloadd.offload.weights.casting import Casting, StoredAs, round_buffers
from offloadd.offload.weights.scratch import Scratch
from offloadd.store.derived_source import DerivedSource
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
        staging: Staging,
    ) -> None:
        self.name = name
        self.grouping = grouping
        self.groups: tuple[Streamed, ...] = ()
        self.module = weakref.ref(module)
        # Adapters wrap layers, and then paths lead elsewhere: the objects are what stays.
        self._paths = {
            path: weakref.ref(child) for path, child in module.named_modules(remove_duplicate=False)
        }
        self._accelerator = accelerator
        self._executor = executor
        self._scratch = Scratch(tier)
        self.adapters = AdapterMemory(tier)
        self._hooks = Hooks()
        self._group_at: dict[Place, Streamed] = {}
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
        self._supply = Supply(source, accelerator, staging)

    @property
    def in_place(self) -> bool:
        """Whether the module computes on the host's own bytes, so that nothing is streamed."""
        return self._supply.loader is None

    @property
    def source(self) -> WeightSource:
        """Where the weights come from that adapters are not fused into."""
        return self._supply.source

    @property
    def derived(self) -> DerivedSource | None:
        """The weights that adapters were fused into, if it computes with such."""
        return self._supply.derived

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
        before, self._supply.derived = self._supply.derived, derived
        try:
            fresh = [
                (tensor, self._supply.stored(*self._range(tensor)))
                for tensor in self._staying()
                if any(one and one.derived(*self._range(tensor)) for one in (before, derived))
            ]
        except BaseException:
            self._supply.derived = before
            raise
        self._hooks.remove()
        self._executor.remove(self.name)
        for tensor, stored in fresh:
            self._leftovers.exchange(self.modules(), tensor, stored)
        self._follow(self.grouping)

    def regroup(self, grouping: Grouping) -> None:
        """Stream in other groups from now on; no forward of the module may be under way.

        Raises OutOfMemory or StorageFailed if what is to stay cannot be loaded; then the groups
        are as before, all absent.
        """
        loader = self._supply.loader
        if self.module() is None or loader is None:
            return
        self._hooks.remove()
        self._executor.remove(self.name)
        try:
            self._leftovers.load(self.modules(), grouping.leftovers, loader)
            self._scratch.reserve(grouping.scratch_bytes)
        except OffloadError:
            self._follow(self.grouping)
            raise
        self._follow(grouping)

    def detach(self) -> None:
        """Let the module go."""
        self._hooks.remove()
        self._executor.remove(self.name)
        for group in self.groups:
            group.binding.unbind()
        self.adapters.close(self.module(), self.own())
        self._leftovers.unload()
        self._scratch.close()
        self._supply.close()

    def _begin(self) -> None:
        """Load what stays and take the module over; on an error nothing was changed."""
        grouping = self.grouping
        try:
            self._scratch.reserve(grouping.scratch_bytes)
            if self._supply.loader is None:
                self._begin_in_place(grouping)
                return
            self._leftovers.load(self.modules(), grouping.leftovers, self._supply.loader)
        except BaseException:
            self._scratch.close()
            self._supply.close()
            raise
        move_buffers(self.modules(), grouping.leftovers, self._accelerator.device)
        self._follow(grouping)

    def _begin_in_place(self, grouping: Grouping) -> None:
        """Bind to the host's bytes once and for all what needs no converting."""
        self._leftovers.use_in_place(self.modules(), self._staying(), self._supply.extent)
        self._follow(grouping)

    def _staying(self) -> list[TensorRef]:
        """The weights that are bound for as long as the module is attached."""
        groups = self.grouping.groups if self.in_place else ()
        plain = [t for group in groups if not group.converted_bytes for t in group.tensors]
        weights = [t for t in self.grouping.leftovers if t.kind == "parameter"]
        return weights + plain

    def _range(self, tensor: TensorRef) -> tuple[int, int]:
        slot = self.grouping.layout.slots()[tensor.spec.name]
        return slot.offset_bytes, slot.stop_bytes

    def _follow(self, grouping: Grouping) -> None:
        """Let the executor bring the grouping's groups, or those that have to be converted."""
        module = self.module()
        assert module is not None  # whoever attaches or regroups holds it
        modules = self.modules()
        brought = streamed_groups(
            self.name, grouping, modules, self._supply, self.reads, self._scratch
        )
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
    casting: Casting | StoredAs | None = None,
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
    if isinstance(casting, Casting):
        round_buffers(module, casting)
    return component
