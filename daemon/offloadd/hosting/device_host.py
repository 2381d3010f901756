"""What all hosted models of a worker share: one engine for the device, one reader, one arena.

One engine, so that models whose plans do not fit together give way to each other group by group.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from offload_protocol.errors import OutOfMemory
from offloadd.channel.specs import QuantizationSpec
from offloadd.hosting.embeddings.store import EmbeddingStore
from offloadd.hosting.loading.parts import Source
from offloadd.hosting.loading.weights import Weights
from offloadd.hosting.packs.packs import Packs
from offloadd.hosting.packs.pickles import Unpickler
from offloadd.hosting.placing.offload_plan import Plan
from offloadd.hosting.placing.presets import casting_of
from offloadd.hosting.running.borders import Borders
from offloadd.offload.accelerator.cpu import CpuAccelerator
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.accelerator.torch_device import TorchAccelerator
from offloadd.offload.engine import Engine
from offloadd.offload.weights.casting import Casting
from offloadd.store.arena.client import ArenaClient
from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.index import ComponentFiles
from offloadd.store.index.pipeline import Recall
from offloadd.store.reader import DiskReader

RESERVE_SHARE = 0.25
RESERVE_AT_MOST_BYTES = 4 << 30
"""Left to activations until the engine has measured more; a picture of 1024 pixels square takes 2
to 5 GB in the common models."""


def reserve_bytes(budget_bytes: int) -> int:
    """What of a device's budget is left to activations at first."""
    return min(int(budget_bytes * RESERVE_SHARE), RESERVE_AT_MOST_BYTES)


class DeviceHost:
    """The device's engine and what brings weights to it; one for each worker process."""

    def __init__(
        self,
        accelerator: Accelerator,
        cache: Path,
        arena: ArenaClient,
        reader: DiskReader,
        beside_turns: Callable[[], AbstractContextManager[None]] = nullcontext,
        embeddings: EmbeddingStore | None = None,
    ) -> None:
        """`cache` is where packs are written; reader and arena stay the caller's.

        `beside_turns` makes a context in which the calling thread does without the device, so that
        jobs go on while it reads. Without `embeddings`, no prompt's are kept.
        """
        self.device = accelerator.device
        self.beside_turns = beside_turns
        self.borders = Borders()
        self.parked_bytes = 0
        """Device memory of jobs that were put aside."""
        self.embeddings = embeddings or EmbeddingStore()
        self.reader = reader
        self.arena = arena
        self._cache = cache
        self._accelerator = accelerator
        memory = self._accelerator.memory()
        self.total_bytes = memory.total_bytes
        if self._accelerator.has_dma:
            arena.use_pin(self._accelerator.pin)
            budget_bytes = memory.free_bytes
            kept_free_bytes = reserve_bytes(budget_bytes)
        else:
            # The host's memory: whoever shares it is counted where models are loaded.
            budget_bytes, kept_free_bytes = memory.total_bytes, 0
        self.engine = Engine(
            self._accelerator,
            budget_bytes,
            reserve_bytes=kept_free_bytes,
            on_border=self.borders.at_root,
        )

    @property
    def computes_in_host_memory(self) -> bool:
        """Whether weights in host memory are computed on where they are."""
        return not self._accelerator.has_dma

    def has_room_for_parked(self, more_bytes: int) -> bool:
        """Whether so much may stay on the device beside the activations of the next job.

        In host memory everything stays where it is.
        """
        if self.computes_in_host_memory:
            return True
        stats = self.engine.stats()
        taken_bytes = stats.resident_bytes + stats.ring_bytes + stats.reserve_bytes
        return taken_bytes + self.parked_bytes + more_bytes <= stats.budget_bytes

    def plan_smaller(self, needed_bytes: int) -> None:
        """Plan with what the device has now, and with so much more of it left to activations.

        For after an allocation was refused: other programs may have taken what was there before.
        Where weights cannot do with less, they go on as they did. In host memory there is no plan
        to make smaller.
        """
        if self.computes_in_host_memory:
            return
        stats = self.engine.stats()
        there_bytes = self._accelerator.memory().free_bytes + stats.resident_bytes
        budget_bytes = min(there_bytes + stats.ring_bytes, stats.budget_bytes)
        for more_bytes in (needed_bytes, 0):
            with suppress(OutOfMemory):
                self.engine.replan(
                    budget_bytes=budget_bytes, reserve_bytes=stats.reserve_bytes + more_bytes
                )
                return

    @property
    def alignment_bytes(self) -> int:
        """Where places in device memory start."""
        return self._accelerator.alignment_bytes

    def supply(self, model: str, plan: Plan, on_disk: dict[str, Path | None]) -> Supplier:
        """Where one model's components get their weights from.

        `on_disk` names those that rest on disk, with the directory for their packs (None: the
        cache).
        """
        return Supplier(self, model, plan, on_disk, self._cache)

    def unpickler(self) -> Unpickler:
        """What rewrites pickles, where a model may have them."""
        return Unpickler(self._cache)

    def close(self) -> None:
        """Let go of the device."""
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Supplier:
    """The `Supply` of one model."""

    host: DeviceHost
    model: str
    plan: Plan
    on_disk: dict[str, Path | None]
    cache: Path

    @property
    def recall(self) -> Recall:
        return self.host.arena.recall

    def packs(self, component: str) -> Packs:
        return Packs(self.on_disk.get(component) or self.cache)

    def casting(self, component: str) -> Casting | None:
        return casting_of(self.plan[component])

    def quantization(self, component: str) -> QuantizationSpec | None:
        return self.plan[component].quantization

    def open(self, files: ComponentFiles, weights: Weights, watch: Callable[[], None]) -> Source:
        index, layout, names = weights.index, weights.layout, weights.names
        owner, arena = f"{self.model}/{files.name}", self.host.arena
        if files.name in self.on_disk:
            meter = arena.meter(owner)
            return CheckpointSource(index, layout, self.host.reader, names=names, meter=meter)
        assert files.checkpoint is not None  # whoever opens its weights has looked
        return arena.open(
            index,
            layout,
            owner=owner,
            names=names,
            origin=(files.origin, files.checkpoint),
            on_bytes=lambda done, total: watch(),
        )

    def beside_turns(self) -> AbstractContextManager[None]:
        return self.host.beside_turns()


def accelerator_for(device: torch.device) -> Accelerator:
    """The engine's view of a device."""
    return CpuAccelerator() if device.type == "cpu" else TorchAccelerator(device)
