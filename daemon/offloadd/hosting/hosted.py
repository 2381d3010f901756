"""A model in memory: loaded, placed on the device, run, and taken out without a trace."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import torch

from offload_protocol.messages import AdapterChoice
from offload_protocol.records import ComponentInfo
from offloadd.channel.calls import may_scale_adapters
from offloadd.hosting.adapters import ModelAdapters
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.embeddings.reuse import EncoderReuse
from offloadd.hosting.loading.loading import Loaded, OnComponent, load_pipeline, modules
from offloadd.hosting.placing.features import switch_on_features
from offloadd.hosting.placing.host_room import HostRoom
from offloadd.hosting.placing.offload_plan import Plan
from offloadd.hosting.placing.offloading import Placement, apply_plan
from offloadd.hosting.placing.presets import resting_on_disk
from offloadd.hosting.running.arguments import Call
from offloadd.hosting.running.aside import JobAside
from offloadd.hosting.running.call_effects import exchanges_processors
from offloadd.hosting.running.global_state import OwnSettings, Randomness, seed_all
from offloadd.hosting.running.job_view import OnStep, job_view
from offloadd.hosting.running.outputs import plain_outputs
from offloadd.hosting.running.previews import OnLatents, showing, shows_latents
from offloadd.hosting.sources.describe import Description
from offloadd.offload.sweep.sweep import SweepRoom


class HostedModel:
    """A pipeline that is ready to run; the thread that has the turn uses it.

    Several jobs may be in the middle of a run, each in its own thread, if all but one gave way.
    """

    def __init__(
        self, description: Description, host: DeviceHost, loaded: Loaded, placement: Placement
    ) -> None:
        self.description = description
        self.device = host.device
        self.moved_bytes = 0
        """Bytes of weights that the last run to end moved to the device, in its own turns."""
        self._host = host
        self._pipeline = loaded.pipeline
        self._loaded = loaded
        self._placement = placement
        self._room = HostRoom(loaded.sources)
        self._whole = self._room.whole()
        self._sweep_room = self._new_sweep_room()
        self._adapters = ModelAdapters(
            description.spec.adapters,
            loaded.pipeline,
            description.adapter_base,
            host.engine,
            placement.hosted,
        )
        reused = modules(loaded.pipeline) if description.spec.reuse_embeddings else {}
        names = placement.hosted
        self._reuse = EncoderReuse(
            host.embeddings, reused, host.device, lambda name: host.engine.skip(names[name])
        )
        self._unwatch = [
            undo
            for module in modules(loaded.pipeline).values()
            for undo in host.borders.watch_inside(module)
        ]

    @classmethod
    def load(
        cls, description: Description, plan: Plan, host: DeviceHost, on_component: OnComponent
    ) -> HostedModel:
        """Load and place a model; raises what `load_pipeline` and `apply_plan` raise."""
        budget_bytes = description.budget_bytes(host.total_bytes)
        on_disk = resting_on_disk(
            plan, description.component_bytes, budget_bytes, host.computes_in_host_memory
        )
        supply = host.supply(description.spec.name, plan, on_disk)
        with ExitStack() as undo:
            loaded = load_pipeline(description.files, description.dtype, supply, on_component)
            undo.callback(loaded.close)
            spec = description.spec
            switch_on_features(spec.name, modules(loaded.pipeline), plan, spec.own_offloads)
            placement = apply_plan(
                host,
                description.spec.name,
                modules(loaded.pipeline),
                loaded.sources,
                plan,
                budget_bytes,
            )
            undo.pop_all()
        return cls(description, host, loaded, placement)

    @property
    def sweep_room(self) -> SweepRoom | None:
        """Where jobs on this model share what it streams; None where nothing can be shared."""
        return self._sweep_room

    @property
    def is_better_shared(self) -> bool:
        """Whether jobs take less time together: transfer is what limits what they share."""
        engine = self._host.engine
        return self._placement.is_there and any(
            engine.is_transfer_limited(name) for name in self._placement.swept
        )

    def _new_sweep_room(self) -> SweepRoom | None:
        names = self._placement.swept
        return self._host.engine.sweep(*names) if names else None

    @property
    def offload(self) -> str:
        """The mode of all components, or `mixed`."""
        modes = {one.mode for one in self._placement.plan.values()}
        return modes.pop() if len(modes) == 1 else "mixed"

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights on the device now."""
        return sum(self._placement.resident_bytes().values())

    def run(
        self,
        call: Call,
        on_step: OnStep,
        at_border: Callable[[], None],
        at_root: Callable[[JobAside], None] | None = None,
        on_latents: OnLatents | None = None,
        adapters: Sequence[AdapterChoice] = (),
        owner: str | None = None,
    ) -> dict[str, Any]:
        """Draw; gives the pipeline's outputs as plain values.

        `at_border` is called wherever the job may be stopped. `at_root` (instead of it, at the
        entry of a root module's forward) may also let others use the model and the device, between
        `leave` and `come_back` of what it is given. `on_latents` is shown the latents after each
        step, where the pipeline shows them. The model wears `adapters` in this run alone. Its text
        encoders answer from what they gave in earlier runs of the same `owner`; None: from nothing.
        Raises whatever the pipeline or these raise, and what `ModelAdapters.load` does; in each
        case the model is ready for the next call.
        """
        self._room.touch()
        view = job_view(self._pipeline, self.device, on_step)
        self._placement.restore()
        self._adapters.load(one.name for one in adapters)
        # What it takes for the model's own settings is a model that wears nothing.
        aside = JobAside(
            self._host, modules(self._pipeline), sys._getframe(), self._adapters.look_again
        )

        def at_root_border() -> None:
            if at_root is None:
                at_border()
            else:
                at_root(aside)

        try:
            self._adapters.wear(adapters)
            with (
                torch.no_grad(),
                _own_randomness(call.seeds[0], self.device),
                self._reuse.on_behalf(owner),
                self._host.borders.heard(at_root_border, at_border),
            ):
                arguments = call.with_noise(self.description.takes_generator)
                if on_latents is not None and shows_latents(type(self._pipeline)):
                    arguments |= showing(on_latents)
                output = view(**arguments)
                outputs = plain_outputs(output)
            self._placement.settle()
            return outputs
        finally:
            self._room.touch()
            self.moved_bytes = aside.moved_bytes
            aside.close()

    def wear(self, adapters: Sequence[AdapterChoice]) -> None:
        """Wear these in a run that has the device again, after others on the same model."""
        self._adapters.wear(adapters)

    def own_settings(self, arguments: Collection[str]) -> Callable[[], OwnSettings] | None:
        """Makes what keeps a call's settings of modules apart; None for one that changes none.

        A call may scale adapters by `..._kwargs`, and some pipelines exchange processors.
        """
        kind: Any = type(self._pipeline)
        if not may_scale_adapters(arguments) and not exchanges_processors(kind):
            return None
        roots = list(modules(self._pipeline).values())
        return partial(OwnSettings, roots, self._adapters.look_again)

    @property
    def needs_gathering(self) -> bool:
        """Whether `gather` has to be called before the next run."""
        return not self._placement.is_there or self._room.is_short

    def rest(self) -> None:
        """Take nothing of the device, and let the store give the weights' memory to others.

        No run may be under way.
        """
        self._remove()

    def gather(self, on_component: OnComponent) -> None:
        """Bring weights back into memory as far as there is room, and place them for a run.

        No run may be under way. Raises what `load` raises; then the model rests.
        """
        total = len(self.description.files.components)
        with self._host.beside_turns():
            self._room.gather(lambda: on_component(0, total))
        whole = self._room.whole()
        if self._placement.is_there and whole == self._whole:
            return
        self._remove()
        self._placement = apply_plan(
            self._host,
            self.description.spec.name,
            modules(self._pipeline),
            self._loaded.sources,
            self._placement.plan,
            self.description.budget_bytes(self._host.total_bytes),
        )
        self._whole = whole
        self._sweep_room = self._new_sweep_room()

    def _remove(self) -> None:
        # Adapters are read again when they are next worn, and may be others then.
        self._reuse.forget()
        # The engine knows modules by their own layers, as they are without adapters around them.
        if self._placement.is_there:
            self._adapters.unload()
        self._placement.remove()

    def components(self) -> list[ComponentInfo]:
        """Each component with its bytes and where they are."""
        stats, resident = self._placement.stats(), self._placement.resident_bytes()
        found = []
        for one in self.description.files.components:
            info = self.description.found(one)
            if one.name in self._loaded.sources:
                info = msgspec.structs.replace(
                    info,
                    bytes=self._placement.weights_bytes[one.name],
                    resident_bytes=resident.get(one.name, 0),
                    streamed_bytes=stats[one.name].streamed_bytes if one.name in stats else 0,
                    host_bytes=_host_bytes(self._loaded.sources[one.name]),
                    offload=self._placement.plan[one.name].mode,
                )
            found.append(info)
        return found

    def unload(self) -> list[str]:
        """Take the model out of memory; gives the components that something still holds."""
        watched = {name: weakref.ref(module) for name, module in modules(self._pipeline).items()}
        while self._unwatch:
            self._unwatch.pop()()
        self._reuse.close()
        self._remove()
        self._loaded.close()
        del self._pipeline, self._loaded, self._adapters
        give_memory_back(self.device)
        return [name for name, module in watched.items() if module() is not None]


def give_memory_back(device: torch.device) -> None:
    """Return what is no longer used to the system and to the device's other users.

    glibc keeps freed pages of its arenas until it is told to trim them.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _host_bytes(source: Any) -> int:
    # A source that rests on disk holds nothing, and has no such figure.
    return int(getattr(source, "host_bytes", 0))


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    # A pipeline that draws without a generator still gives the same picture for the same seed,
    # and leaves no trace in what the next one draws.
    before = Randomness.now(device)
    seed_all(seed)
    try:
        yield
    finally:
        before.restore(device)
