"""Writes packs: weights in the dtype that they are served in, as one plain safetensors file.

Promises: a pack is whole or not there (temporary name, fsync, rename), its data start on a page so
that they can be read past the page cache, and free space is checked before the first byte. Tensors
follow each other without gaps, since the format forbids holes; readers place them at their aligned
offsets.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from typing_extensions import Buffer

from offload_protocol.errors import StorageFailed
from offloadd.store.layout import TensorSpec

DATA_ALIGNMENT_BYTES = 4096
_UNFINISHED = ".unfinished"
_FREE_RESERVE_BYTES = 1024 * 1024
NO_METADATA: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PackEntry:
    """One tensor; `produce` gives its bytes (row-major, little-endian) when they are written."""

    spec: TensorSpec
    produce: Callable[[], Buffer]


@dataclass(frozen=True, slots=True)
class Pack:
    """What was written: the file, its size, and the CRC-32 of its data, in file order."""

    path: Path
    size_bytes: int
    crc32: int


def write_pack(
    path: Path, entries: Iterable[PackEntry], metadata: Mapping[str, str] = NO_METADATA
) -> Pack:
    """Write the tensors, in the order given, to `path`; an older file there is replaced.

    `metadata` goes into the header.

    Left-overs of writers that died are deleted from the directory. Raises StorageFailed, naming
    the directory and the bytes wanted, when they do not fit or may not be written; ValueError when
    an entry gives another number of bytes than it said. Nothing is left behind then.
    """
    tensors = tuple(entries)
    header = _header([entry.spec for entry in tensors], metadata)
    size_bytes = len(header) + sum(entry.spec.size_bytes for entry in tensors)
    with _storage_errors(path.parent, size_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        clean_leftovers(path.parent)
        _check_room(path.parent, size_bytes)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}{_UNFINISHED}")
        try:
            crc32 = _write(unfinished, header, tensors)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        _sync_directory(path.parent)
    return Pack(path, size_bytes, crc32)


def clean_leftovers(directory: Path) -> None:
    """Delete unfinished packs whose writer is not running any more."""
    for leftover in directory.glob(f"*{_UNFINISHED}"):
        writer = leftover.name.removesuffix(_UNFINISHED).rpartition(".")[2]
        if not (writer.isdigit() and Path(f"/proc/{writer}").exists()):
            leftover.unlink(missing_ok=True)


def _header(specs: list[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset_bytes = 0
    for spec in specs:
        stop_bytes = offset_bytes + spec.size_bytes
        described[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset_bytes, stop_bytes],
        }
        offset_bytes = stop_bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    # The format lets a header end in spaces, and says nothing about where the data must start.
    text += b" " * (-(len(text) + 8) % DATA_ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def _write(path: Path, header: bytes, tensors: tuple[PackEntry, ...]) -> int:
    crc32 = 0
    with path.open("wb") as file:
        file.write(header)
        for entry in tensors:
            data = memoryview(entry.produce()).cast("B")
            if data.nbytes != entry.spec.size_bytes:
                raise ValueError(
                    f"{entry.spec.name!r} has {data.nbytes} bytes, not {entry.spec.size_bytes}"
                )
            crc32 = zlib.crc32(data, crc32)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return crc32


def _check_room(directory: Path, size_bytes: int) -> None:
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < size_bytes + _FREE_RESERVE_BYTES:
        _refuse(directory, size_bytes, f"only {free_bytes} bytes are free")


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors(directory: Path, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _refuse(directory, size_bytes, error.strerror or str(error), error)


def _refuse(directory: Path, size_bytes: int, why: str, cause: OSError | None = None) -> NoReturn:
    raise StorageFailed(
        f"{size_bytes} bytes of weights cannot be written to {directory}: {why}",
        hint="free space there, or configure another cache directory",
        details={"directory": str(directory), "size_bytes": size_bytes},
    ) from cause
