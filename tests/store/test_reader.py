"""The disk reader gives the file's bytes or a coded error, whatever happens to the file."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from store.checkpoints import (
    Arrays,
    arrays,
    assert_holds,
    layout_of,
    open_descriptors,
    write_file,
    write_shards,
)

from offload_protocol.errors import ModelLoadFailed, ShuttingDown, StorageFailed
from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.host_source import HostSource
from offloadd.store.index import read_checkpoint
from offloadd.store.open_file import ReadCall
from offloadd.store.reader import SMALLEST_CHUNK_BYTES, DiskReader
from offloadd.store.source import WeightSource

SIZES: dict[str, tuple[int, ...]] = {
    "a.weight": (700, 1031),
    "a.bias": (1031,),
    "b.weight": (257, 129),
    "b.scale": (),
    "c.weight": (1500, 999),
    "c.empty": (0, 4),
    "d.weight": (3,),
}


@pytest.fixture
def reader() -> Iterator[DiskReader]:
    with DiskReader(threads=3, chunk_bytes=SMALLEST_CHUNK_BYTES) as made:
        yield made


def source_of(path: Path, reader: DiskReader, **options: Any) -> CheckpointSource:
    index = read_checkpoint(path)
    return CheckpointSource(index, layout_of(index), reader, **options)


def whole(source: CheckpointSource) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(source.layout.size_bytes, 1)))
    memory = memory[: source.layout.size_bytes]
    source.read(0, source.layout.size_bytes, memory).result(timeout=30)
    return memory


def failure(source: CheckpointSource) -> StorageFailed:
    with pytest.raises(StorageFailed) as caught:
        whole(source)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("odd_by", [0, 1, 3, 7])
def test_what_is_read_equals_what_safetensors_loads_bit_for_bit(
    tmp_path: Path, reader: DiskReader, odd_by: int, direct: bool
) -> None:
    path = write_file(tmp_path / "model.safetensors", arrays(SIZES), odd_by=odd_by)
    source = source_of(path, reader, direct=direct)
    assert_holds(whole(source), source.layout, load_file(path))


def test_direct_reads_are_really_direct_where_the_file_system_has_them(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", arrays(SIZES))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    flags: set[int] = set()

    def watching(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        info = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        flags.add(int(info.split("flags:")[1].split()[0], 8) & os.O_DIRECT)
        return os.preadv(descriptor, buffers, offset)

    with DiskReader(threads=1) as reader:
        whole(source_of(path, reader, read_call=watching))
    assert flags == {os.O_DIRECT}


def test_a_refused_direct_read_goes_on_through_the_page_cache(
    tmp_path: Path, reader: DiskReader
) -> None:
    written = arrays(SIZES)
    path = write_file(tmp_path / "model.safetensors", written)
    refusals: list[int] = []

    def refusing_first(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not refusals:
            refusals.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(descriptor, buffers, offset)

    source = source_of(path, reader, read_call=refusing_first)
    assert_holds(whole(source), source.layout, written)
    assert refusals


def test_short_reads_are_continued(tmp_path: Path, reader: DiskReader) -> None:
    written = arrays(SIZES)
    path = write_file(tmp_path / "model.safetensors", written, odd_by=5)

    def stingy(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(descriptor, [buffers[0][:100_352]], offset)

    for direct in (True, False):
        source = source_of(path, reader, direct=direct, read_call=stingy)
        assert_holds(whole(source), source.layout, written)


def test_many_ranges_at_once_are_each_right_and_gaps_stay(
    tmp_path: Path, reader: DiskReader
) -> None:
    written = arrays(SIZES)
    write_shards(
        tmp_path,
        {
            f"{at}.safetensors": {name: written[name] for name in list(SIZES)[at::2]}
            for at in range(2)
        },
    )
    source = source_of(tmp_path, reader)
    reference = whole(source)
    random = np.random.default_rng(5)
    cuts = [sorted(random.integers(0, len(reference) + 1, 2).tolist()) for _ in range(60)]
    memories = [bytearray(b"\xee" * (stop - start)) for start, stop in cuts]
    waiting = [
        source.read(start, stop, memoryview(memory), urgent=bool(at % 5 == 0))
        for at, ((start, stop), memory) in enumerate(zip(cuts, memories, strict=True))
    ]
    counts = [future.result(timeout=60) for future in waiting]
    filled = np.zeros(len(reference), bool)
    for slot in source.layout.slots().values():
        filled[slot.offset_bytes : slot.stop_bytes] = True
    model = np.where(filled, np.frombuffer(reference, np.uint8), 0xEE)
    for (start, stop), memory, count in zip(cuts, memories, counts, strict=True):
        assert memory == model[start:stop].astype(np.uint8).tobytes()
        assert count == filled[start:stop].sum()


def test_case_15_a_file_overwritten_in_place_is_noticed_before_its_bytes_are_used(
    tmp_path: Path, reader: DiskReader
) -> None:
    path = write_file(tmp_path / "model.safetensors", arrays(SIZES))
    source = source_of(path, reader)
    whole(source)
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))
    error = failure(source)
    assert f"{path} was written to" in error.message
    assert error.details["expected"]["mtime_ns"] != error.details["found"]["mtime_ns"]


def test_case_15_an_overwrite_that_puts_the_modification_time_back_is_noticed(
    tmp_path: Path, reader: DiskReader
) -> None:
    path = write_file(tmp_path / "model.safetensors", arrays(SIZES))
    source = source_of(path, reader)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "may have been written to" in failure(source).message


@pytest.mark.parametrize("direct", [True, False])
def test_case_15_a_truncated_file_is_an_error_and_never_a_signal(
    tmp_path: Path, reader: DiskReader, direct: bool
) -> None:
    path = write_file(tmp_path / "model.safetensors", arrays(SIZES))
    other = write_file(tmp_path / "other.safetensors", arrays(SIZES, seed=1))
    source, healthy = source_of(path, reader, direct=direct), source_of(other, reader)
    size = path.stat().st_size
    os.truncate(path, size // 3)
    error = failure(source)
    assert str(path) in error.message
    assert str(size // 3) in error.message
    assert_holds(whole(healthy), healthy.layout, arrays(SIZES, seed=1))


@pytest.mark.parametrize("change", ["replace", "unlink", "rename", "directory", "chmod", "link"])
def test_case_15_a_new_download_or_a_removal_leaves_the_hosted_bytes_as_they_were(
    tmp_path: Path, reader: DiskReader, change: str
) -> None:
    written = arrays(SIZES)
    folder = tmp_path / "model"
    folder.mkdir()
    path = write_file(folder / "model.safetensors", written)
    source = source_of(path, reader)
    assert source.stale_files == ()
    if change == "replace":
        write_file(folder / "new", arrays(SIZES, seed=1)).replace(path)
    elif change == "unlink":
        path.unlink()
    elif change == "rename":
        path.rename(folder / "away")
    elif change == "directory":
        folder.rename(tmp_path / "gone")
    elif change == "chmod":
        path.chmod(0o600)
    else:
        os.link(path, folder / "second")
    for _ in range(2):
        assert_holds(whole(source), source.layout, written)
    assert source.stale_files == (() if change in ("chmod", "link") else (path,))


def test_case_15_a_file_changed_after_it_was_indexed_is_not_opened(
    tmp_path: Path, reader: DiskReader
) -> None:
    path = write_file(tmp_path / "model.safetensors", arrays(SIZES))
    index = read_checkpoint(path)
    write_file(tmp_path / "new", arrays(SIZES, seed=1)).replace(path)
    with pytest.raises(StorageFailed, match="no longer the file that was indexed"):
        CheckpointSource(index, layout_of(index), reader)
    path.unlink()
    with pytest.raises(StorageFailed, match="could not be opened"):
        CheckpointSource(index, layout_of(index), reader)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_failing_disk_fails_the_range_that_needs_it_and_nothing_else(
    tmp_path: Path, reader: DiskReader, code: int
) -> None:
    written = arrays(SIZES)
    path = write_file(tmp_path / "model.safetensors", written)
    is_broken = True

    def failing(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if is_broken and offset >= SMALLEST_CHUNK_BYTES:
            raise OSError(code, os.strerror(code))
        return os.preadv(descriptor, buffers, offset)

    source = source_of(path, reader, read_call=failing)
    healthy = source_of(path, reader)
    error = failure(source)
    assert str(path) in error.message
    assert os.strerror(code) in error.message
    assert error.details["errno"] == code
    assert_holds(whole(healthy), healthy.layout, written)
    is_broken = False
    assert_holds(whole(source), source.layout, written)


class Gate:
    """A read call that lets one read through at a time, and notes their order."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.entered = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        self.entered.release()
        assert self.leave.acquire(timeout=30)
        return os.preadv(descriptor, buffers, offset)


def spread(path: Path) -> Arrays:
    """Four tensors, each far enough from the next to be a read of its own."""
    written = arrays({f"{at}": (SMALLEST_CHUNK_BYTES // 4,) for at in range(4)})
    write_file(path, written)
    return written


def ranges(source: CheckpointSource) -> list[tuple[int, int]]:
    slots = source.layout.slots()
    return [(slots[f"{at}"].offset_bytes, slots[f"{at}"].stop_bytes) for at in range(4)]


def test_ranges_come_in_order_a_miss_comes_first_and_a_waiting_one_can_be_cancelled(
    tmp_path: Path,
) -> None:
    written = spread(tmp_path / "model.safetensors")
    gate = Gate()
    read_call: ReadCall = gate
    with DiskReader(threads=1, chunk_bytes=2 * SMALLEST_CHUNK_BYTES) as reader:
        source = source_of(tmp_path, reader, read_call=read_call)
        memory = [bytearray(stop - start) for start, stop in ranges(source)]
        futures = []
        for at, (start, stop) in enumerate(ranges(source)):
            futures.append(source.read(start, stop, memoryview(memory[at]), urgent=at == 3))
            if at == 0:
                assert gate.entered.acquire(timeout=30)
        assert futures[1].cancel()
        assert not futures[0].cancel()
        for _ in range(3):
            gate.leave.release()
        wait(futures, timeout=30)
    firsts = {name: place.start_bytes for name, place in read_checkpoint(tmp_path).tensors.items()}
    order = [min(firsts, key=lambda name: abs(firsts[name] - offset)) for offset in gate.offsets]
    assert order == ["0", "3", "2"]
    assert memory[1] == bytes(len(memory[1]))
    for at in (0, 2, 3):
        assert memory[at] == written[f"{at}"].tobytes()


def test_closing_the_reader_leaves_no_future_open(tmp_path: Path) -> None:
    spread(tmp_path / "model.safetensors")
    gate = Gate()
    reader = DiskReader(threads=1, chunk_bytes=SMALLEST_CHUNK_BYTES)
    source = source_of(tmp_path, reader, read_call=gate)
    begun = source.read(
        0, source.layout.size_bytes, memoryview(bytearray(source.layout.size_bytes))
    )
    (start, stop), *_ = ranges(source)
    waiting = source.read(start, stop, memoryview(bytearray(stop - start)))
    assert gate.entered.acquire(timeout=30)
    closing = threading.Thread(target=reader.close)
    closing.start()
    with pytest.raises(CancelledError):
        waiting.result(timeout=30)
    gate.leave.release()
    closing.join(timeout=30)
    with pytest.raises(ShuttingDown):
        begun.result(timeout=30)
    with pytest.raises(ShuttingDown):
        source.read(start, stop, memoryview(bytearray(stop - start))).result()


def test_a_finished_read_holds_on_to_nothing(tmp_path: Path, reader: DiskReader) -> None:
    path = write_file(tmp_path / "model.safetensors", arrays(SIZES))
    gc.collect()
    before = open_descriptors()
    source = source_of(path, reader)
    with mmap.mmap(-1, source.layout.size_bytes) as memory, memoryview(memory) as view:
        source.read(0, source.layout.size_bytes, view).result(timeout=30)
        # Leaving the block unmaps the memory, which fails while anybody still has a view of it.
    os.truncate(path, 1000)
    with mmap.mmap(-1, source.layout.size_bytes) as memory, memoryview(memory) as view:
        failed = source.read(0, source.layout.size_bytes, view)
        assert isinstance(failed.exception(timeout=30), StorageFailed)
    source.close()
    with pytest.raises(StorageFailed, match="was closed"):
        source.read(0, 4, memoryview(bytearray(4))).result()
    del source
    assert open_descriptors() == before


def test_a_destination_that_does_not_fit_is_a_mistake_of_the_caller(
    tmp_path: Path, reader: DiskReader
) -> None:
    source = source_of(write_file(tmp_path / "model.safetensors", arrays(SIZES)), reader)
    with pytest.raises(ValueError, match="a range of 8 bytes into 4"):
        source.read(0, 8, memoryview(bytearray(4)))
    with pytest.raises(ValueError, match="must be writable"):
        source.read(0, 4, memoryview(bytes(4)))
    size = source.layout.size_bytes
    with pytest.raises(ValueError, match="is not in an extent"):
        source.read(size, size + 4, memoryview(bytearray(4)))


def test_a_layout_that_the_checkpoint_does_not_fit_is_refused(
    tmp_path: Path, reader: DiskReader
) -> None:
    index = read_checkpoint(write_file(tmp_path / "model.safetensors", arrays(SIZES)))
    other = read_checkpoint(write_file(tmp_path / "other.safetensors", arrays({"a.weight": (2,)})))
    with pytest.raises(ModelLoadFailed, match="lacks 6 of the model's tensors"):
        CheckpointSource(other, layout_of(index), reader)


@pytest.mark.parametrize("piece_bytes", [64 * 1024 * 1024, 100_000])
def test_an_extent_in_host_memory_has_the_exact_size_and_the_same_bytes(
    tmp_path: Path, reader: DiskReader, piece_bytes: int
) -> None:
    written = arrays(SIZES)
    path = write_file(tmp_path / "model.safetensors", written)
    source = source_of(path, reader)
    held = HostSource.load(source, piece_bytes=piece_bytes)
    source.close()
    path.unlink()
    view = held.host_view()
    assert view is not None
    assert view.readonly
    assert_holds(view, held.layout, written)
    size = held.layout.size_bytes
    assert os.fstat(held.descriptor).st_size == size
    assert os.fstat(held.descriptor).st_blocks * 512 <= -(-size // 4096) * 4096
    start, stop = 1000, size - 1000
    memory = bytearray(b"\xee" * (stop - start))
    served: WeightSource = held
    assert served.read(start, stop, memoryview(memory)).result() == 0
    for slot in held.layout.slots().values():
        low, high = max(slot.offset_bytes, start), min(slot.stop_bytes, stop)
        if low < high:
            assert memory[low - start : high - start] == view[low:high]
    held.release_view()


def test_closing_host_memory_gives_it_back_with_the_last_view(
    tmp_path: Path, reader: DiskReader
) -> None:
    gc.collect()
    before = open_descriptors()
    source = source_of(write_file(tmp_path / "model.safetensors", arrays(SIZES)), reader)
    held = HostSource.load(source)
    source.close()
    del source
    view = held.host_view()
    assert view is not None
    held.close()
    assert bytes(view[:4])
    with pytest.raises(StorageFailed, match="after it was closed"):
        held.host_view()
    del view
    assert open_descriptors() == before


def test_a_load_into_host_memory_that_fails_keeps_nothing(
    tmp_path: Path, reader: DiskReader
) -> None:
    path = write_file(tmp_path / "model.safetensors", arrays(SIZES))
    source = source_of(path, reader)
    os.truncate(path, 1000)
    gc.collect()
    before = open_descriptors()
    with pytest.raises(StorageFailed):
        HostSource.load(source, piece_bytes=100_000)
    assert open_descriptors() == before
