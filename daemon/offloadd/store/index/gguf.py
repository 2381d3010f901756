"""The header of a GGUF file, checked before a byte of tensor data is allocated.

Format (versions 2 and 3, little-endian): magic, version, counts of tensors and of settings; the
settings (key, type, value); for each tensor its name, dimensions (fastest first), type and offset;
padding to `general.alignment`; the data. What a type's blocks are is told by whoever asks, since
the library that computes with them knows.

A tensor of a block type is indexed as bytes: its last dimension counts those of a row.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from offloadd.store.index.checkpoint import CheckpointIndex, TensorPlace
from offloadd.store.index.header import HEADER_LIMIT_BYTES, BadHeader
from offloadd.store.index.identity import FileIdentity
from offloadd.store.index.weight_file import (
    IndexedFile,
    exactly,
    open_regular,
    told_of,
    unreadable,
)
from offloadd.store.layout import TensorSpec, align

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DIMENSIONS = 4
_ALIGNMENT_KEY = b"general.alignment"
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_NESTED_AT_MOST = 4
_PLAIN = {0: "F32", 1: "F16"}


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of the format: so many elements of a row in so many bytes."""

    name: str
    elements: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int


def read_gguf(path: Path, types: Mapping[int, BlockType]) -> CheckpointIndex:
    """Index a file; `types` are those that can be computed with, by their numbers.

    The index's metadata gives the name of the type of each tensor that is held in blocks. Raises
    `ModelLoadFailed` that says what is wrong with the file, `StorageFailed` where the disk fails.
    """
    try:
        with closing(open_regular(path)) as raw:
            identity = FileIdentity.of(os.fstat(raw.fileno()))
            entries, data_start = _header(_Cursor(raw, identity.size_bytes))
    except BadHeader as error:
        raise told_of(path, error, "GGUF") from None
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        specs = {one.name: _spec(one, types) for one in entries}
        places = {
            one.name: TensorPlace(specs[one.name], 0, data_start + one.offset_bytes)
            for one in entries
        }
        _check_cover(places, identity.size_bytes)
    except BadHeader as error:
        raise told_of(path, error, "GGUF") from None
    blocks = {one.name: types[one.type_id].name for one in entries if one.type_id not in _PLAIN}
    return CheckpointIndex(path, (IndexedFile(path, identity),), places, blocks)


class _Cursor:
    """Reads on from a file's start, never past its end nor past what a header may take."""

    def __init__(self, raw: FileIO, file_bytes: int) -> None:
        self._raw = raw
        self._limit = min(file_bytes, HEADER_LIMIT_BYTES)
        self._file_bytes = file_bytes
        self.at = 0

    def take(self, size_bytes: int) -> bytes:
        if self.at + size_bytes > self._limit:
            is_cut = self._limit == self._file_bytes
            raise BadHeader(
                f"its header needs {self.at + size_bytes} bytes but "
                + (f"the file has {self._limit}" if is_cut else f"{self._limit} are allowed"),
                expected=self.at + size_bytes,
                found=self._limit,
                truncated=is_cut,
            )
        self.at += size_bytes
        return exactly(self._raw, size_bytes)

    def number(self, kind: str) -> int:
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))
        return int(value)

    def text(self) -> bytes:
        return self.take(self.number("Q"))


def _header(cursor: _Cursor) -> tuple[list[_Entry], int]:
    """The tensors, and where the data starts."""
    magic = cursor.take(len(_MAGIC))
    if magic != _MAGIC:
        raise BadHeader(f"it begins with {magic!r}, not with {_MAGIC!r}", found=repr(magic))
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise BadHeader(f"its version is {version}, and versions 2 and 3 are known", found=version)
    tensors, settings = cursor.number("Q"), cursor.number("Q")
    alignment = 32
    for _ in range(settings):
        key, value = cursor.text(), _value(cursor, cursor.number("I"), 0)
        if key == _ALIGNMENT_KEY and value is not None:
            alignment = value
    if alignment < 1 or alignment > 1 << 20 or alignment & (alignment - 1):
        raise BadHeader(f"its alignment is {alignment}, no power of two", found=alignment)
    entries: dict[str, _Entry] = {}
    for _ in range(tensors):
        entry = _entry(cursor, alignment)
        if entry.name in entries:
            raise BadHeader("it is there twice", tensor=entry.name)
        entries[entry.name] = entry
    return list(entries.values()), align(cursor.at, alignment)


def _value(cursor: _Cursor, type_id: int, depth: int) -> int | None:
    """Read over a setting's value; gives it if it is a whole number of 32 bits."""
    if type_id == _UINT32:
        return cursor.number("I")
    if type_id in _SCALAR_BYTES:
        cursor.take(_SCALAR_BYTES[type_id])
    elif type_id == _STRING:
        cursor.text()
    elif type_id == _ARRAY and depth < _NESTED_AT_MOST:
        inner, count = cursor.number("I"), cursor.number("Q")
        if inner in _SCALAR_BYTES:
            cursor.take(count * _SCALAR_BYTES[inner])
        else:
            for _ in range(count):
                _value(cursor, inner, depth + 1)
    else:
        raise BadHeader(f"a setting has a value of type {type_id}, which is not known")
    return None


def _entry(cursor: _Cursor, alignment: int) -> _Entry:
    try:
        name = cursor.text().decode()
    except UnicodeDecodeError:
        raise BadHeader("the name of a tensor is no text") from None
    count = cursor.number("I")
    if not 1 <= count <= _DIMENSIONS:
        raise BadHeader(f"it has {count} dimensions; 1 to 4 are allowed", tensor=name, found=count)
    shape = tuple(reversed([cursor.number("Q") for _ in range(count)]))
    if 0 in shape:
        # Its other dimensions would be bounded by nothing.
        raise BadHeader("it has no elements", tensor=name, found=list(shape))
    type_id, offset_bytes = cursor.number("I"), cursor.number("Q")
    if offset_bytes % alignment:
        raise BadHeader(
            f"it starts at byte {offset_bytes} of the data, no multiple of {alignment}",
            tensor=name,
            found=offset_bytes,
        )
    return _Entry(name, shape, type_id, offset_bytes)


def _spec(entry: _Entry, types: Mapping[int, BlockType]) -> TensorSpec:
    if entry.type_id in _PLAIN:
        return TensorSpec(entry.name, _PLAIN[entry.type_id], entry.shape)
    block = types.get(entry.type_id)
    if block is None:
        known = ", ".join(sorted(one.name for one in types.values()))
        raise BadHeader(
            f"it is of type {entry.type_id}, which cannot be computed with (those that can are "
            f"F32, F16, {known})",
            tensor=entry.name,
            found=entry.type_id,
        )
    *rows, row = entry.shape
    if row % block.elements:
        raise BadHeader(
            f"its rows have {row} elements, which no whole blocks of {block.elements} "
            f"({block.name}) hold",
            tensor=entry.name,
            found=row,
        )
    return TensorSpec(entry.name, "U8", (*rows, row // block.elements * block.size_bytes))


def _check_cover(places: Mapping[str, TensorPlace], file_bytes: int) -> None:
    end, before = 0, ""
    for name, place in sorted(places.items(), key=lambda item: item[1].start_bytes):
        if place.start_bytes < end:
            raise BadHeader(f"it overlaps {before!r}", tensor=name, found=place.start_bytes)
        if place.stop_bytes > file_bytes:
            raise BadHeader(
                f"the tensor {name!r} needs a file of {place.stop_bytes} bytes but it has "
                f"{file_bytes}",
                expected=place.stop_bytes,
                found=file_bytes,
                truncated=True,
            )
        end, before = place.stop_bytes, name
