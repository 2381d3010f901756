"""A planned and scattered read puts the same bytes in place as copying byte by byte would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_protocol.errors import ModelLoadFailed
from offloadd.store.index import CheckpointIndex, FileIdentity, IndexedFile, TensorPlace
from offloadd.store.layout import Layout, TensorSpec, lay_out
from offloadd.store.read_plan import BLOCK_BYTES, Chunk, ExtentMap, Segment, plan_chunks
from offloadd.store.scatter import BUFFERED, Alignment, scatter

ALIGNMENTS = (BUFFERED, Alignment(512, 4, 1024), Alignment(512, 512, 512), Alignment(4096, 4096, 1))
ADDRESS = 4096 * 7
PATTERN = bytes((7 * at + at // 256) % 256 for at in range(100_000))


@dataclass(frozen=True)
class World:
    """Files of known bytes, an index of tensors in them, and the extent they should become."""

    files: tuple[bytes, ...]
    index: CheckpointIndex
    layout: Layout
    extent: bytes
    """What a naive copy gives; the gaps hold 0xEE."""


@st.composite
def worlds(draw: st.DrawFn) -> World:
    files: list[bytes] = []
    places: dict[str, TensorPlace] = {}
    for file_index in range(draw(st.integers(1, 2))):
        cursor = draw(st.integers(8, 700))
        for at in range(draw(st.integers(0, 5))):
            size = draw(st.one_of(st.integers(0, 400), st.integers(3000, 20000)))
            name = f"f{file_index}.t{at}"
            places[name] = TensorPlace(TensorSpec(name, "U8", (size,)), file_index, cursor)
            cursor += size + draw(st.sampled_from([0, 0, 0, 100, 9000]))
        files.append((PATTERN[97 * file_index :] * 2)[:cursor])
    names = draw(st.permutations(sorted(places)))
    layout = lay_out((name, [places[name].spec]) for name in names)
    extent = bytearray(b"\xee" * layout.size_bytes)
    for name, slot in layout.slots().items():
        place = places[name]
        data = files[place.file_index][place.start_bytes : place.stop_bytes]
        extent[slot.offset_bytes : slot.stop_bytes] = data
    indexed = tuple(
        IndexedFile(Path(f"f{at}"), FileIdentity(0, at, len(data), 0, 0, 1, 0, (0, 0)))
        for at, data in enumerate(files)
    )
    return World(
        tuple(files), CheckpointIndex(Path("x"), indexed, places, {}), layout, bytes(extent)
    )


def carry_out(
    chunks: list[Chunk], files: tuple[bytes, ...], size: int, how: Alignment
) -> bytearray:
    """What a reader does with the plan, on plain bytes; untouched bytes stay 0xEE."""
    into = bytearray(b"\xee" * size)
    for chunk in chunks:
        data = files[chunk.file_index][chunk.start_bytes : chunk.stop_bytes]
        data += b"\xdd" * (chunk.stop_bytes - chunk.start_bytes - len(data))
        divided = scatter(chunk, ADDRESS, how)
        bounce = bytearray(len(data))
        cursor = 0
        for vector in divided.vectors:
            part = data[cursor : cursor + vector.size_bytes]
            assert vector.size_bytes % how.block_bytes == 0
            if vector.into_bytes is None:
                bounce[cursor : cursor + vector.size_bytes] = part
            else:
                assert (ADDRESS + vector.into_bytes) % how.memory_bytes == 0
                into[vector.into_bytes : vector.into_bytes + vector.size_bytes] = part
            cursor += vector.size_bytes
        assert cursor == chunk.stop_bytes - chunk.start_bytes
        for copy in divided.copies:
            into[copy.into_bytes : copy.into_bytes + copy.size_bytes] = bounce[
                copy.bounce_bytes : copy.bounce_bytes + copy.size_bytes
            ]
    return into


@settings(deadline=None)
@given(worlds(), st.data())
def test_any_range_is_filled_as_a_naive_copy_would_and_gaps_are_left_alone(
    world: World, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, world.layout.size_bytes))
    stop = data.draw(st.integers(start, world.layout.size_bytes))
    chunk_bytes = BLOCK_BYTES * data.draw(st.integers(1, 4))
    bridge_bytes = data.draw(st.sampled_from([0, 200, BLOCK_BYTES]))
    segments = ExtentMap(world.layout, world.index).segments(start, stop)
    chunks = plan_chunks(segments, chunk_bytes, bridge_bytes=bridge_bytes)
    how = data.draw(st.sampled_from(ALIGNMENTS))
    into = carry_out(chunks, world.files, stop - start, how)
    expected = world.extent[start:stop]
    assert into == expected
    assert all(chunk.stop_bytes - chunk.start_bytes <= chunk_bytes for chunk in chunks)
    assert all(chunk.start_bytes % BLOCK_BYTES == 0 for chunk in chunks)
    assert all(
        chunk.start_bytes + chunk.needed_bytes <= len(world.files[chunk.file_index])
        for chunk in chunks
    )
    assert sum(chunk.payload_bytes for chunk in chunks) == sum(one.size_bytes for one in segments)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 9000)), min_size=1, max_size=5))
def test_segments_that_share_bytes_of_a_file_are_each_filled(ranges: list[tuple[int, int]]) -> None:
    data = bytes(at * 7 % 251 for at in range(20000))
    segments: list[Segment] = []
    cursor = 0
    for start, size in ranges:
        segments.append(Segment(0, start, cursor, size))
        cursor += size
    chunks = plan_chunks(segments, 2 * BLOCK_BYTES, bridge_bytes=100)
    into = carry_out(chunks, (data,), cursor, Alignment(512, 4, 512))
    assert into == b"".join(data[start : start + size] for start, size in ranges)


def test_neighbours_in_a_file_are_read_at_once_and_far_ones_apart() -> None:
    near = [Segment(0, 10_000, 0, 500), Segment(0, 10_500, 512, 500), Segment(0, 12_000, 1024, 10)]
    far = Segment(0, 10_000_000, 2048, 10)
    chunks = plan_chunks([far, *near], 1024 * 1024)
    assert [len(chunk.segments) for chunk in chunks] == [3, 1]
    assert (chunks[0].start_bytes, chunks[0].stop_bytes) == (8192, 12288)


def test_a_destination_that_agrees_with_the_file_is_read_in_place() -> None:
    aligned = Segment(0, 4096, 0, 1024 * 1024)
    (chunk,) = plan_chunks([aligned], 2 * 1024 * 1024)
    divided = scatter(chunk, ADDRESS, Alignment(512, 512, 65536))
    assert divided.copies == ()
    assert [vector.into_bytes for vector in divided.vectors] == [0]


def test_a_tensor_of_another_dtype_is_refused_by_name() -> None:
    place = TensorPlace(TensorSpec("w", "F32", (4,)), 0, 100)
    file = IndexedFile(Path("model.safetensors"), FileIdentity(0, 1, 116, 0, 0, 1, 0, (0, 0)))
    index = CheckpointIndex(file.path, (file,), {"w": place}, {})
    layout = lay_out([("", [TensorSpec("w", "BF16", (4,))])])
    with pytest.raises(ModelLoadFailed, match="tensor 'w' is F32, but BF16 is wanted"):
        ExtentMap(layout, index)


def test_a_tensor_may_have_another_name_in_the_checkpoint() -> None:
    place = TensorPlace(TensorSpec("old.w", "U8", (4,)), 0, 100)
    file = IndexedFile(Path("model.safetensors"), FileIdentity(0, 1, 104, 0, 0, 1, 0, (0, 0)))
    index = CheckpointIndex(file.path, (file,), {"old.w": place}, {})
    layout = lay_out([("", [TensorSpec("w", "U8", (4,))])])
    with pytest.raises(ModelLoadFailed):
        ExtentMap(layout, index)
    assert ExtentMap(layout, index, {"w": "old.w"}).segments(0, 4) == [Segment(0, 100, 0, 4)]
