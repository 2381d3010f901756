"""A tiny model's weights in fp8: cast once into a pack, and served from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.rig import disk_source
from torch import nn

from offloadd.offload.grouping.groups import module_layout
from offloadd.offload.weights.casting import Casting, cast_entries
from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.host_source import HostSource
from offloadd.store.index import read_checkpoint
from offloadd.store.pack import write_pack
from offloadd.store.reader import DiskReader
from offloadd.store.source import WeightSource


@contextmanager
def cast_source(
    module: nn.Module, casting: Casting, path: Path, *, in_memory: bool
) -> Iterator[WeightSource]:
    """The module's weights as the casting stores them, on disk or in host memory."""
    stored = module_layout(module, casting)
    with disk_source(module, path.with_suffix(".plain.safetensors")) as plain:
        write_pack(path, cast_entries(plain, stored))
    reader = DiskReader(threads=1)
    on_disk = CheckpointSource(read_checkpoint(path), stored, reader)
    source = HostSource.load(on_disk) if in_memory else on_disk
    try:
        yield source
    finally:
        source.close()
        on_disk.close()
        reader.close()
