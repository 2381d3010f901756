"""Reading weights neither relies on the page cache nor fills it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from store.checkpoints import arrays, layout_of, write_file

from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.index import read_checkpoint
from offloadd.store.prefault import prefault
from offloadd.store.reader import DiskReader


def cached_pages(path: Path) -> int:
    """Pages of the file that the page cache holds, by mincore(2)."""
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    with (
        path.open("rb") as file,
        mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        ) as view,
    ):
        first = ctypes.c_char.from_buffer(view)
        pages = ctypes.create_string_buffer(-(-len(view) // mmap.PAGESIZE))
        assert mincore(ctypes.addressof(first), len(view), pages) == 0
        del first
        return sum(page & 1 for page in pages.raw)


@pytest.mark.parametrize("direct", [True, False])
def test_a_whole_read_leaves_next_to_nothing_in_the_page_cache(
    tmp_path: Path, direct: bool
) -> None:
    path = write_file(tmp_path / "model.safetensors", arrays({"w": (8 * 1024 * 1024,)}))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(path) > 64:
        pytest.skip("this file system keeps its files in memory")
    index = read_checkpoint(path)
    layout = layout_of(index)
    memory = bytearray(layout.size_bytes)
    with DiskReader(threads=2) as reader:
        source = CheckpointSource(index, layout, reader, direct=direct)
        source.read(0, layout.size_bytes, memoryview(memory)).result(timeout=60)
    # 4096 pages were read; what read-ahead fetched past a chunk may still be there.
    assert cached_pages(path) < 600


def test_prefaulting_keeps_the_bytes_that_are_there() -> None:
    with mmap.mmap(-1, 8 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[100:105] = b"bytes"
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        prefault(address + 50, 3 * mmap.PAGESIZE)
        assert memory[100:105] == b"bytes"


def test_prefaulting_what_cannot_be_faulted_is_no_error() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ) as memory:
        view = memoryview(memory)
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        view.release()
        assert prefault(address, mmap.PAGESIZE) is False
