"""From a byte range of an extent to the file reads that fill it.

Pure. Tensors lie tightly packed at any offset in their files and 256-byte aligned in the extent,
so a range becomes segments (runs of equal bytes), segments that are near each other in a file
become one span, and spans are cut into chunks that several threads can read at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from offload_protocol.errors import ModelLoadFailed
from offloadd.store.index import CheckpointIndex, TensorPlace
from offloadd.store.layout import Layout, TensorSlot, align

BLOCK_BYTES = 4096
"""Chunks begin and end on multiples of this: every block size that direct I/O may ask for."""

BRIDGE_BYTES = 64 * 1024
"""Two segments with a smaller gap between them in the file are read together: reading the gap
takes less time than a second request does."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`size_bytes` bytes of a file and the offset in the destination at which they belong."""

    file_index: int
    file_start_bytes: int
    into_bytes: int
    size_bytes: int

    @property
    def file_stop_bytes(self) -> int:
        return self.file_start_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """One read: a block-aligned range of a file (it may end past the file's end) and its use."""

    file_index: int
    start_bytes: int
    stop_bytes: int
    segments: tuple[Segment, ...]

    @property
    def needed_bytes(self) -> int:
        """Bytes from the start up to the last one that is used."""
        return max(segment.file_stop_bytes for segment in self.segments) - self.start_bytes

    @property
    def payload_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


class ExtentRanges:
    """The parts of an extent that hold bytes, found by range; gaps and empty tensors are none."""

    def __init__(self, layout: Layout) -> None:
        filled = [slot for unit in layout.units for slot in unit.tensors if slot.spec.size_bytes]
        self.slots: Sequence[TensorSlot] = sorted(filled, key=lambda slot: slot.offset_bytes)
        self._starts = [slot.offset_bytes for slot in self.slots]
        self._size_bytes = layout.size_bytes

    def within(self, start_bytes: int, stop_bytes: int) -> list[tuple[int, int, int]]:
        """(position in `slots`, start, stop) of each part, in extent order, offsets in the extent.

        Raises `ValueError` for a range that is not in the extent.
        """
        if not 0 <= start_bytes <= stop_bytes <= self._size_bytes:
            raise ValueError(
                f"range {start_bytes}..{stop_bytes} is not in an extent of {self._size_bytes} bytes"
            )
        first = max(bisect_right(self._starts, start_bytes) - 1, 0)
        found: list[tuple[int, int, int]] = []
        for position in range(first, len(self.slots)):
            slot = self.slots[position]
            if slot.offset_bytes >= stop_bytes:
                break
            begin, end = max(slot.offset_bytes, start_bytes), min(slot.stop_bytes, stop_bytes)
            if begin < end:
                found.append((position, begin, end))
        return found


class ExtentMap:
    """A layout laid over a checkpoint: where in the files each tensor of the extent comes from."""

    def __init__(
        self,
        layout: Layout,
        index: CheckpointIndex,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names` gives the checkpoint's name of a tensor where it is not the layout's own.

        Raises `ModelLoadFailed` when a tensor is not in the checkpoint as the layout has it.
        """
        renamed = names or {}
        self._ranges = ExtentRanges(layout)
        wanted = {renamed.get(name, name): slot for name, slot in layout.slots().items()}
        index.require({name: slot.spec.shape for name, slot in wanted.items()})
        self._places = [
            _place(index, renamed.get(slot.spec.name, slot.spec.name), slot)
            for slot in self._ranges.slots
        ]

    def segments(self, start_bytes: int, stop_bytes: int) -> list[Segment]:
        """The parts of the extent's range that hold bytes, in extent order; gaps are left out.

        Offsets into the destination count from `start_bytes`. Raises `ValueError` for a range
        that is not in the extent.
        """
        found: list[Segment] = []
        for position, begin, end in self._ranges.within(start_bytes, stop_bytes):
            place = self._places[position]
            within = begin - self._ranges.slots[position].offset_bytes
            found.append(
                Segment(
                    place.file_index, place.start_bytes + within, begin - start_bytes, end - begin
                )
            )
        return found


def _place(index: CheckpointIndex, name: str, slot: TensorSlot) -> TensorPlace:
    place = index.tensors[name]
    if name in index.unplaced:
        raise ValueError(f"{index.location} holds {name!r} arranged otherwise: it is to be packed")
    if place.spec.dtype != slot.spec.dtype:
        path = index.files[place.file_index].path
        raise ModelLoadFailed(
            f"{path}: tensor {name!r} is {place.spec.dtype}, but {slot.spec.dtype} is wanted",
            hint="read it in the file's own dtype, or cast the checkpoint into a pack first",
            details={
                "path": str(path),
                "tensor": name,
                "expected": slot.spec.dtype,
                "found": place.spec.dtype,
            },
        )
    return place


def plan_chunks(
    segments: Sequence[Segment], chunk_bytes: int, *, bridge_bytes: int = BRIDGE_BYTES
) -> list[Chunk]:
    """Cover the segments with reads of at most `chunk_bytes`, in file order.

    `chunk_bytes` is a multiple of 4096, `bridge_bytes` at most `chunk_bytes`. Segments may share
    bytes of a file (tied tensors are read once).
    """
    if chunk_bytes <= 0 or chunk_bytes % BLOCK_BYTES or bridge_bytes > chunk_bytes:
        raise ValueError(f"chunks of {chunk_bytes} bytes with bridges of {bridge_bytes}")
    chunks: list[Chunk] = []
    ordered = sorted(segments, key=lambda one: (one.file_index, one.file_start_bytes))
    for span in _spans(ordered, bridge_bytes):
        chunks.extend(_cut(span, chunk_bytes))
    return chunks


def fair_chunk_bytes(total_bytes: int, threads: int, *, smallest: int, largest: int) -> int:
    """A chunk size that gives every thread a part of a range, within the limits."""
    return min(max(align(-(-total_bytes // threads), BLOCK_BYTES), smallest), largest)


def _spans(ordered: Iterable[Segment], bridge_bytes: int) -> Iterable[list[Segment]]:
    span: list[Segment] = []
    stop = 0
    for segment in ordered:
        apart = bool(span) and (
            segment.file_index != span[0].file_index
            or segment.file_start_bytes > stop + bridge_bytes
        )
        if apart:
            yield span
            span = []
        stop = max(stop, segment.file_stop_bytes) if span else segment.file_stop_bytes
        span.append(segment)
    if span:
        yield span


def _cut(span: list[Segment], chunk_bytes: int) -> Iterable[Chunk]:
    origin = span[0].file_start_bytes // BLOCK_BYTES * BLOCK_BYTES
    end = align(max(segment.file_stop_bytes for segment in span), BLOCK_BYTES)
    parts: list[list[Segment]] = [[] for _ in range(-(-(end - origin) // chunk_bytes))]
    for segment in span:
        first = (segment.file_start_bytes - origin) // chunk_bytes
        last = (segment.file_stop_bytes - 1 - origin) // chunk_bytes
        for at in range(first, last + 1):
            low = origin + at * chunk_bytes
            parts[at].append(_clip(segment, low, low + chunk_bytes))
    for at, part in enumerate(parts):
        low = origin + at * chunk_bytes
        if part:
            yield Chunk(span[0].file_index, low, min(low + chunk_bytes, end), tuple(part))


def _clip(segment: Segment, low: int, high: int) -> Segment:
    begin = max(segment.file_start_bytes, low)
    end = min(segment.file_stop_bytes, high)
    shift = begin - segment.file_start_bytes
    return Segment(segment.file_index, begin, segment.into_bytes + shift, end - begin)
