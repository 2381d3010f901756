"""Streams a tiny model for a test: from a real checkpoint on disk, or from host memory to a device.

Promises: the bytes streamed are those of the module given, read back from a safetensors file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from safetensors.torch import save_file
from torch import nn

from offloadd.offload.accelerator.cpu import CpuAccelerator
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.accelerator.simulated import Link, SimulatedAccelerator
from offloadd.offload.component import Component, attach_component
from offloadd.offload.grouping.groups import GroupOptions, group_module, module_layout
from offloadd.offload.streaming.executor import Executor
from offloadd.offload.streaming.tier import DeviceTier
from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.host_source import HostSource
from offloadd.store.index import read_checkpoint
from offloadd.store.reader import DiskReader
from offloadd.store.source import WeightSource

DEVICE_BYTES = 1 << 28


def save_weights(module: nn.Module, path: Path) -> None:
    """Write the module's parameters, each once and under its owner's name."""
    wanted = module_layout(module).slots()
    tensors = dict(module.named_parameters(remove_duplicate=False))
    save_file({name: tensors[name].detach().contiguous().clone() for name in wanted}, path)


@contextmanager
def disk_source(module: nn.Module, path: Path) -> Iterator[CheckpointSource]:
    """The module's weights in a file, read by reader threads."""
    save_weights(module, path)
    layout = module_layout(module)
    del module  # a test may want to see it go
    reader = DiskReader(threads=2)
    source = CheckpointSource(read_checkpoint(path), layout, reader)
    try:
        yield source
    finally:
        source.close()
        reader.close()


@contextmanager
def host_source(module: nn.Module, path: Path) -> Iterator[HostSource]:
    """The module's weights in host memory, filled from a file."""
    with disk_source(module, path) as on_disk:
        del module
        source = HostSource.load(on_disk)
    try:
        yield source
    finally:
        source.close()


def simulated_device(seed: int = 0, link: Link | None = None) -> SimulatedAccelerator:
    """A device with random delays, that the seed alone decides."""
    return SimulatedAccelerator(
        DEVICE_BYTES, link or Link(1e9, latency_s=1e-5, jitter_s=1e-3), Random(seed)
    )


@dataclass(slots=True)
class Rig:
    """An executor and what it drives; `stream` attaches modules to it."""

    accelerator: Accelerator
    tier: DeviceTier
    executor: Executor
    directory: Path
    cleanup: ExitStack

    def stream(
        self,
        name: str,
        module: nn.Module,
        options: GroupOptions | None = None,
        *,
        keep_every: int = 0,
        ring_groups: float = 2.0,
    ) -> Component:
        """Attach a module; one group in `keep_every` stays (0: none).

        The ring holds `ring_groups` times the largest group.
        """
        grouping = group_module(module, options or GroupOptions(small_limit_bytes=0))
        source: WeightSource
        path = self.directory / f"{name}.safetensors"
        if self.accelerator.has_dma:
            source = self.cleanup.enter_context(host_source(module, path))
        else:
            source = self.cleanup.enter_context(disk_source(module, path))
        component = attach_component(
            name, module, grouping, source, self.accelerator, self.tier, self.executor
        )
        count = len(grouping.groups)
        keep = frozenset(range(0, count, keep_every)) if keep_every else frozenset[int]()
        passing = [g.size_bytes for g in grouping.groups if g.index not in keep]
        ring_bytes = int(max(passing, default=0) * ring_groups)
        self.executor.configure(name, keep, ring_bytes)
        return component


@contextmanager
def rig(accelerator: Accelerator, directory: Path) -> Iterator[Rig]:
    """A rig on a device; everything it attached is left to the caller, files are closed."""
    tier = DeviceTier(accelerator, DEVICE_BYTES)
    with ExitStack() as cleanup:
        yield Rig(accelerator, tier, Executor(accelerator, tier), directory, cleanup)


def cpu_device() -> CpuAccelerator:
    return CpuAccelerator()
