"""A model in memory: loaded, placed on the device, run, and taken out without a trace."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload_protocol.messages import ComponentInfo
from offloadd.hosting.arguments import Call
from offloadd.hosting.describe import Description
from offloadd.hosting.job_view import OnStep, borders, job_view
from offloadd.hosting.loading import OnComponent, load_pipeline, modules
from offloadd.hosting.offload_plan import Plan
from offloadd.hosting.offloading import Placement, apply_plan
from offloadd.hosting.outputs import plain_outputs


class HostedModel:
    """A pipeline that is ready to run; used by one thread at a time."""

    def __init__(
        self, description: Description, device: torch.device, pipeline: Any, placement: Placement
    ) -> None:
        self.description = description
        self.device = device
        self._pipeline = pipeline
        self._placement = placement

    @classmethod
    def load(
        cls, description: Description, plan: Plan, device: torch.device, on_component: OnComponent
    ) -> HostedModel:
        """Load and place a model; raises what `load_pipeline` and `apply_plan` raise."""
        pipeline = load_pipeline(description.files, description.dtype, on_component)
        return cls(description, device, pipeline, apply_plan(pipeline, plan, device))

    @property
    def offload(self) -> str:
        """The mode of all components, or `mixed`."""
        modes = {one.mode for one in self._placement.plan.values()}
        return modes.pop() if len(modes) == 1 else "mixed"

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights on the device now."""
        return sum(self._placement.resident_bytes(name) for name in self._placement.plan)

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights that the last run copied to the device."""
        return self._placement.moves.moved_bytes

    def run(self, call: Call, on_step: OnStep, at_border: Callable[[], None]) -> dict[str, Any]:
        """Draw; gives the pipeline's outputs as plain values.

        Raises whatever the pipeline, `on_step` or `at_border` raises; in each case the model is
        ready for the next call.
        """
        view = job_view(self._pipeline, self.device, on_step)
        settled = False
        self._placement.moves.reset()
        try:
            with torch.no_grad(), _own_randomness(call.seeds[0], self.device):
                with borders(view, at_border):
                    output = view(**call.with_noise(self.description.takes_generator))
                outputs = plain_outputs(output)
            settled = True
        finally:
            if not settled or self._placement.needs_settling:
                self._placement.settle()
        return outputs

    def components(self) -> list[ComponentInfo]:
        """Each component with its bytes and where they are."""
        loaded = modules(self._pipeline)
        return [
            self._component(name, loaded.get(name), kind) for name, kind in self._kinds().items()
        ]

    def unload(self) -> list[str]:
        """Take the model out of memory; gives the components that something still holds."""
        watched = {name: weakref.ref(module) for name, module in modules(self._pipeline).items()}
        self._placement.remove()
        del self._pipeline
        give_memory_back(self.device)
        return [name for name, module in watched.items() if module() is not None]

    def _kinds(self) -> dict[str, str]:
        return {one.name: one.class_name for one in self.description.files.components}

    def _component(self, name: str, module: torch.nn.Module | None, kind: str) -> ComponentInfo:
        if module is None:
            return ComponentInfo(name=name, kind=kind)
        total = self.description.component_bytes[name]
        resident = self._placement.resident_bytes(name)
        offload = self._placement.plan[name]
        on_disk = offload.offload_to_disk_path is not None
        return ComponentInfo(
            name=name,
            kind=kind,
            bytes=total,
            resident_bytes=resident,
            streamed_bytes=total if offload.mode in ("sequential", "group") else 0,
            host_bytes=0 if on_disk or (self.device.type != "cpu" and resident) else total,
            offload=offload.mode,
        )


def give_memory_back(device: torch.device) -> None:
    """Return what is no longer used to the system and to the device's other users.

    The hooks of block-level offloading form cycles with their modules, which only the collector
    frees; glibc keeps freed pages of its arenas until it is told to trim them.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    # A pipeline that draws without a generator still gives the same picture for the same seed,
    # and leaves no trace in what the next one draws.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
