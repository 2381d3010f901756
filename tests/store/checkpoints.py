"""Small checkpoints on disk for the store's tests, and plain ways to look into them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import Layout, lay_out

Arrays = dict[str, np.ndarray[Any, Any]]

INDEX_NAME = "diffusion_pytorch_model.safetensors.index.json"


def arrays(sizes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    """Random 16-bit patterns of the given shapes."""
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 2**16, size=shape, dtype=np.uint16)
        for name, shape in sizes.items()
    }


def write_file(path: Path, tensors: Arrays, *, odd_by: int | None = None) -> Path:
    """A safetensors file; `odd_by` shifts its data to that offset modulo 8."""
    blob = save(tensors)
    if odd_by is not None:
        (length,) = struct.unpack("<Q", blob[:8])
        pad = (odd_by - length) % 8
        header = blob[8 : 8 + length] + b" " * pad
        blob = struct.pack("<Q", length + pad) + header + blob[8 + length :]
    path.write_bytes(blob)
    return path


def write_shards(folder: Path, shards: Mapping[str, Arrays], index_name: str = INDEX_NAME) -> Path:
    """Shard files and the index that places every tensor of them."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for name, tensors in shards.items():
        write_file(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / index_name).write_text(json.dumps(index))
    return folder / index_name


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with any header at all: text is taken as it is, anything else becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def layout_of(index: CheckpointIndex, *, units: int = 3) -> Layout:
    """The checkpoint's tensors in reversed order (never the file's), spread over a few units."""
    specs = [place.spec for place in reversed(list(index.tensors.values()))]
    size = max(-(-len(specs) // units), 1)
    return lay_out(
        (f"unit{at}", specs[at * size : (at + 1) * size]) for at in range(-(-len(specs) // size))
    )


def assert_holds(memory: memoryview | bytes | bytearray, layout: Layout, tensors: Arrays) -> None:
    """Every tensor is at its place, bit for bit."""
    for name, slot in layout.slots().items():
        found = bytes(memory[slot.offset_bytes : slot.stop_bytes])
        assert found == tensors[name].tobytes(), name


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
