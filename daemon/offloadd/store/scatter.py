"""Where the bytes of one read go: straight to their destination, or through the bounce buffer.

Pure. A direct read needs blocks of the file and aligned memory. Where the destination of a run of
whole blocks is aligned well enough it is read in place; what is left (the partial blocks at a
tensor's ends, gaps, small tensors, and everything if the memory does not fit) goes through a
bounce buffer and is copied. Both happen in one vectored read.
"""

from __future__ import annotations

from dataclasses import dataclass

from offloadd.store.layout import align
from offloadd.store.read_plan import Chunk, Segment

VECTORS_LIMIT = 512
"""Half of what Linux takes in one call (IOV_MAX is 1024)."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """What a file asks of a read: block of the file, alignment of memory, and the smallest run
    of bytes that is worth a vector of its own."""

    block_bytes: int
    memory_bytes: int
    smallest_bytes: int


BUFFERED = Alignment(block_bytes=1, memory_bytes=1, smallest_bytes=1)


@dataclass(frozen=True, slots=True)
class Vector:
    """The next `size_bytes` of the read: to the destination's offset, or to the bounce buffer.

    In the bounce buffer each byte has the place that it has in the chunk.
    """

    size_bytes: int
    into_bytes: int | None


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of the bounce buffer that belong elsewhere."""

    bounce_bytes: int
    into_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Scatter:
    vectors: tuple[Vector, ...]
    copies: tuple[Copy, ...]


def scatter(chunk: Chunk, destination_address: int, alignment: Alignment) -> Scatter:
    """Divide a chunk between destination and bounce buffer.

    `destination_address` is the memory address of the destination's first byte.
    """
    vectors: list[Vector] = []
    copies: list[Copy] = []
    cursor = chunk.start_bytes
    previous_stop = chunk.start_bytes
    for segment in chunk.segments:
        if segment.file_start_bytes < previous_stop:
            return _all_bounced(chunk)  # two destinations for the same bytes: read once, copy twice
        previous_stop = segment.file_stop_bytes
        low, high = _whole_blocks(segment, destination_address, alignment)
        if high > low:
            if low > cursor:
                vectors.append(Vector(low - cursor, None))
            vectors.append(Vector(high - low, _into(segment, low)))
            cursor = high
        copies.extend(_rest(chunk, segment, low, high))
    if cursor < chunk.stop_bytes:
        vectors.append(Vector(chunk.stop_bytes - cursor, None))
    if len(vectors) > VECTORS_LIMIT:
        return _all_bounced(chunk)
    return Scatter(tuple(vectors), tuple(copies))


def _all_bounced(chunk: Chunk) -> Scatter:
    copies = tuple(
        Copy(part.file_start_bytes - chunk.start_bytes, part.into_bytes, part.size_bytes)
        for part in chunk.segments
    )
    return Scatter((Vector(chunk.stop_bytes - chunk.start_bytes, None),), copies)


def _whole_blocks(segment: Segment, address: int, alignment: Alignment) -> tuple[int, int]:
    """The part of a segment that can be read in place, as file offsets; empty if none can."""
    low = align(segment.file_start_bytes, alignment.block_bytes)
    high = segment.file_stop_bytes // alignment.block_bytes * alignment.block_bytes
    fits = (address + _into(segment, low)) % alignment.memory_bytes == 0
    if not fits or high - low < alignment.smallest_bytes:
        return segment.file_start_bytes, segment.file_start_bytes
    return low, high


def _into(segment: Segment, file_bytes: int) -> int:
    return segment.into_bytes + file_bytes - segment.file_start_bytes


def _rest(chunk: Chunk, segment: Segment, low: int, high: int) -> list[Copy]:
    if low >= high:
        ranges = [(segment.file_start_bytes, segment.file_stop_bytes)]
    else:
        ranges = [(segment.file_start_bytes, low), (high, segment.file_stop_bytes)]
    return [
        Copy(begin - chunk.start_bytes, _into(segment, begin), end - begin)
        for begin, end in ranges
        if begin < end
    ]
