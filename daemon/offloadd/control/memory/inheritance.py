"""What one daemon leaves to the next: segments kept by systemd, and an index that explains them.

Committed segments go to the service manager's descriptor store one by one. The index is a memfd of
its own there; it has two halves that are written in turn, so that a daemon killed while it writes
leaves a whole one. Nothing is trusted that the index does not name with its size and seals, and
workers check the bytes against their checksums before they use them.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from offloadd.control.memory import memfd
from offloadd.control.memory.extents import ExtentRecord, SegmentRecord

INDEX_NAME = "index"
_SEGMENT_PREFIX = "segment-"
_HALF_BYTES = 256 << 20
"""Room for one index; the memfd is sparse, so only what was written takes memory."""
_HEAD = struct.Struct("<8sQQI")
_MAGIC = b"offload1"

_log = logging.getLogger(__name__)


class DescriptorStore(Protocol):
    """Where descriptors outlive this process."""

    def inherited(self) -> list[tuple[str, int]]:
        """Names and descriptors that an earlier process left; they are now ours to close."""
        ...

    def keep(self, name: str, descriptor: int) -> bool:
        """Hand over a descriptor; whether that worked."""
        ...

    def drop(self, name: str) -> None:
        """Let go of what was kept under a name."""
        ...


class _Extent(msgspec.Struct, frozen=True):
    key: str
    sizes: list[int]
    numbers: list[int | None]
    indexes: dict[str, bytes]
    owners: list[str]


class _Index(msgspec.Struct, frozen=True):
    extents: list[_Extent]
    checksums: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Left:
    """What an earlier daemon left that can be used."""

    extents: list[ExtentRecord] = field(default_factory=list)
    segments: list[SegmentRecord] = field(default_factory=list)
    descriptors: dict[int, int] = field(default_factory=dict)


class Inheritance:
    """Keeps what may be kept; without a store (None) everything ends with the process."""

    def __init__(self, store: DescriptorStore | None) -> None:
        self._store = store
        self._kept: set[int] = set()
        self._index: int | None = None
        self._sequence = 0
        self._written = b""

    def take_over(self) -> Left:
        """What is there from an earlier daemon; whatever makes no sense is let go."""
        if self._store is None:
            return Left()
        found = dict(self._store.inherited())
        self._index = found.pop(INDEX_NAME, None)
        index = self._read_index()
        given = {
            int(name.removeprefix(_SEGMENT_PREFIX)): descriptor
            for name, descriptor in found.items()
            if name.removeprefix(_SEGMENT_PREFIX).isdecimal()
        }
        left = _match(index, given) if index is not None else Left()
        for number in given.keys() - left.descriptors.keys():
            memfd.punch_out(given[number])
            os.close(given[number])
            self._store.drop(f"{_SEGMENT_PREFIX}{number}")
        self._kept = set(left.descriptors)
        if left.segments:
            total = sum(segment.size_bytes for segment in left.segments)
            _log.info("%d segments (%d bytes) are left from before", len(left.segments), total)
        return left

    def keep(self, number: int, descriptor: int) -> None:
        """A segment is final."""
        if self._store is not None and self._store.keep(f"{_SEGMENT_PREFIX}{number}", descriptor):
            self._kept.add(number)

    def drop(self, number: int) -> None:
        """A segment is being freed."""
        if self._store is not None and number in self._kept:
            self._kept.discard(number)
            self._store.drop(f"{_SEGMENT_PREFIX}{number}")

    def note(
        self, extents: Mapping[str, ExtentRecord], segments: Mapping[int, SegmentRecord]
    ) -> None:
        """Write the index if it has changed."""
        if self._store is None:
            return
        body = msgspec.msgpack.encode(_describe(extents, segments, self._kept))
        if body != self._written and len(body) + _HEAD.size <= _HALF_BYTES:
            self._write_index(body)

    def close(self) -> None:
        """Let go of our own descriptor of the index; the store has another."""
        if self._index is not None:
            os.close(self._index)
            self._index = None

    def _write_index(self, body: bytes) -> None:
        if self._index is None:
            self._index = memfd.create("offloadd-index", 2 * _HALF_BYTES)
            assert self._store is not None
            self._store.keep(INDEX_NAME, self._index)
        self._sequence += 1
        head = _HEAD.pack(_MAGIC, self._sequence, len(body), zlib.crc32(body))
        os.pwrite(self._index, head + body, self._sequence % 2 * _HALF_BYTES)
        self._written = body

    def _read_index(self) -> _Index | None:
        if self._index is None:
            return None
        if not memfd.is_sealed(self._index, 2 * _HALF_BYTES):
            os.close(self._index)
            self._index = None
            return None
        halves = [half for at in (0, 1) if (half := _read_half(self._index, at)) is not None]
        if not halves:
            return None
        self._sequence, body = max(halves)
        try:
            return msgspec.msgpack.decode(body, type=_Index)
        except msgspec.DecodeError as error:
            _log.warning("the index of an earlier version is not used: %s", error)
            return None


def _read_half(index: int, at: int) -> tuple[int, bytes] | None:
    magic, sequence, length, checksum = _HEAD.unpack(os.pread(index, _HEAD.size, at * _HALF_BYTES))
    if magic != _MAGIC or length > _HALF_BYTES:
        return None
    body = os.pread(index, length, at * _HALF_BYTES + _HEAD.size)
    return (sequence, body) if zlib.crc32(body) == checksum else None


def _describe(
    extents: Mapping[str, ExtentRecord],
    segments: Mapping[int, SegmentRecord],
    kept: set[int],
) -> _Index:
    checksums = {
        number: segment.checksum
        for number, segment in segments.items()
        if number in kept and segment.checksum is not None and segment.pieces
    }
    return _Index(
        [
            _Extent(
                one.key,
                list(one.sizes),
                [number if number in checksums else None for number in one.numbers],
                one.indexes,
                sorted(one.owners),
            )
            for one in extents.values()
        ],
        checksums,
    )


def _match(index: _Index, given: Mapping[int, int]) -> Left:
    left = Left()
    for told in index.extents:
        if len(told.numbers) != len(told.sizes) or not told.owners:
            continue
        numbers = [
            number if _fits(number, size, given, index) else None
            for number, size in zip(told.numbers, told.sizes, strict=True)
        ]
        if all(number is None for number in numbers):
            continue
        owners: dict[str, set[int]] = {owner: set() for owner in told.owners}
        extent = ExtentRecord(told.key, tuple(told.sizes), numbers, 0.0, told.indexes, owners)
        left.extents.append(extent)
    for extent in left.extents:
        for piece, number in enumerate(extent.numbers):
            if number is not None:
                _segment(left, number, extent.sizes[piece], index, given).pieces.add(
                    (extent.key, piece)
                )
    return left


def _fits(number: int | None, size: int, given: Mapping[int, int], index: _Index) -> bool:
    return number in given and number in index.checksums and memfd.is_sealed(given[number], size)


def _segment(
    left: Left, number: int, size: int, index: _Index, given: Mapping[int, int]
) -> SegmentRecord:
    known = next((one for one in left.segments if one.number == number), None)
    if known is None:
        known = SegmentRecord(number, size, checksum=index.checksums[number])
        left.segments.append(known)
        left.descriptors[number] = given[number]
    return known
