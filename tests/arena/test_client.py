"""A worker opens weights in the arena and finds them bit for bit, from disk or from memory."""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from arena.conftest import Mapped
from store.checkpoints import arrays, assert_holds, layout_of, open_descriptors, write_file

from offload_protocol.errors import Cancelled, ModelLoadFailed, StorageFailed
from offloadd.store.arena.client import ArenaClient
from offloadd.store.arena.key import extent_key, pack_index, piece_sizes, unpack_index
from offloadd.store.index import CheckpointIndex, read_checkpoint
from offloadd.store.layout import lay_out
from offloadd.store.reader import DiskReader

PAGE = mmap.PAGESIZE
SIZES = {"a": (3000, 7), "b": (5,), "c": (640, 64), "d": (33_000,)}


@pytest.fixture
def reader() -> Iterator[DiskReader]:
    with DiskReader(threads=2, chunk_bytes=1 << 20) as reader:
        yield reader


@pytest.fixture
def index(tmp_path: Path) -> CheckpointIndex:
    return read_checkpoint(write_file(tmp_path / "model.safetensors", arrays(SIZES)))


@pytest.fixture
def client(reader: DiskReader) -> Iterator[ArenaClient]:
    client = ArenaClient.alone(reader, piece_bytes=4 * PAGE)
    yield client
    client.close()


def test_an_extent_of_many_segments_is_one_view(
    client: ArenaClient, index: CheckpointIndex
) -> None:
    source = client.open(index, layout_of(index))
    assert len(source.pin_borders) > 5
    view = source.host_view()
    assert view is not None
    assert view.readonly
    assert view.nbytes == source.layout.size_bytes
    assert_holds(view, source.layout, arrays(SIZES))
    source.close()


def test_any_range_can_be_read_from_memory(client: ArenaClient, index: CheckpointIndex) -> None:
    source = client.open(index, layout_of(index))
    whole = source.host_view()
    assert whole is not None
    for start, stop in [(0, 10), (PAGE * 3 + 5, PAGE * 9 + 7), (0, source.layout.size_bytes)]:
        into = bytearray(stop - start)
        assert source.read(start, stop, memoryview(into)).result() == 0
        for slot in source.layout.slots().values():
            low, high = max(slot.offset_bytes, start), min(slot.stop_bytes, stop)
            assert into[low - start : high - start] == whole[low:high]
    source.close()


def test_a_second_opening_reads_nothing_and_needs_no_files(
    client: ArenaClient, index: CheckpointIndex, reader: DiskReader
) -> None:
    first = client.open(index, layout_of(index), owner="m/unet")
    read_bytes = reader.read_bytes_total
    index.files[0].path.unlink()
    second = client.open(index, layout_of(index, units=1), owner="n/unet")
    assert reader.read_bytes_total == read_bytes
    first.close()
    view = second.host_view()
    assert view is not None
    assert_holds(view, second.layout, arrays(SIZES))
    second.close()


def test_closing_returns_memory_at_once_or_with_the_last_view(
    client: ArenaClient, index: CheckpointIndex, mapped: Mapped
) -> None:
    gc.collect()
    before = open_descriptors()
    source = client.open(index, layout_of(index))
    view = source.host_view()
    assert view is not None
    part = np.frombuffer(view, np.uint8)[10:20]
    del view
    source.close()
    # Somebody still computes on it.
    assert part.sum() >= 0
    assert mapped()
    del part
    wait_for_nothing(mapped)
    assert open_descriptors() == before
    with pytest.raises(StorageFailed, match="after they were closed"):
        source.host_view()


def test_a_view_that_lives_on_serves_the_next_opening(
    client: ArenaClient, index: CheckpointIndex, reader: DiskReader
) -> None:
    source = client.open(index, layout_of(index))
    view = source.host_view()
    source.close()
    read_bytes = reader.read_bytes_total
    again = client.open(index, layout_of(index))
    assert reader.read_bytes_total == read_bytes
    del view
    held = again.host_view()
    assert held is not None
    assert_holds(held, again.layout, arrays(SIZES))
    again.close()


def test_weights_cannot_be_written_to(client: ArenaClient, index: CheckpointIndex) -> None:
    source = client.open(index, layout_of(index))
    lines = Path("/proc/self/smaps").read_text().splitlines()
    modes = {line.split()[1] for line in lines if "memfd:offloadd-extent" in line}
    assert modes == {"r--s"}
    source.close()


def test_a_cancelled_opening_leaves_nothing(
    client: ArenaClient, index: CheckpointIndex, mapped: Mapped
) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise Cancelled("enough")

    before = open_descriptors()
    with pytest.raises(Cancelled):
        client.open(index, layout_of(index), on_bytes=stop)
    assert not mapped()
    assert open_descriptors() == before


def test_a_file_that_was_replaced_fails_the_opening_and_leaves_nothing(
    client: ArenaClient, index: CheckpointIndex, mapped: Mapped
) -> None:
    path = index.files[0].path
    write_file(path, arrays(SIZES, seed=1))
    with pytest.raises(StorageFailed, match="no longer the file"):
        client.open(index, layout_of(index))
    assert not mapped()


def test_a_layout_of_another_checkpoint_is_refused(
    client: ArenaClient, index: CheckpointIndex, tmp_path: Path
) -> None:
    other = read_checkpoint(write_file(tmp_path / "other.safetensors", arrays({"z": (4,)})))
    with pytest.raises(ModelLoadFailed, match="lacks"):
        client.open(index, layout_of(other))


def test_an_extent_without_tensors_is_an_empty_view(
    client: ArenaClient, index: CheckpointIndex
) -> None:
    source = client.open(index, lay_out([]))
    view = source.host_view()
    assert view is not None
    assert view.nbytes == 0
    source.close()


def test_the_key_follows_files_and_places_and_nothing_else(
    index: CheckpointIndex, tmp_path: Path
) -> None:
    key = extent_key(index, layout_of(index))
    assert extent_key(index, layout_of(index, units=1)) == key
    forward = lay_out([("", [place.spec for place in index.tensors.values()])])
    assert extent_key(index, forward) != key
    os.utime(index.files[0].path, ns=(1, 1))
    assert extent_key(read_checkpoint(index.files[0].path), layout_of(index)) != key


def test_an_index_survives_being_packed(index: CheckpointIndex) -> None:
    again = unpack_index(pack_index(index))
    assert again == index
    assert extent_key(again, layout_of(again)) == extent_key(index, layout_of(index))


@pytest.mark.parametrize(("size", "pieces"), [(0, []), (1, [PAGE]), (9 * PAGE, [4, 4, 1])])
def test_pieces_are_whole_pages_and_no_larger_than_needed(size: int, pieces: list[int]) -> None:
    expected = [piece if piece == PAGE else piece * PAGE for piece in pieces]
    assert piece_sizes(size, 4 * PAGE) == expected


def wait_for_nothing(mapped: Mapped) -> None:
    deadline = time.monotonic() + 10
    while mapped():
        assert time.monotonic() < deadline
        time.sleep(0.01)
