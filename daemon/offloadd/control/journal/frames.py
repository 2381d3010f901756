"""Frames of requests and results: small ones inside the database, larger ones in files beside it.

A file is whole or not there: written under another name, then renamed. Large frames stay out of the
database since SQLite would write them twice (to its log, then into pages) and keep their room.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from offload_protocol.errors import StorageFailed

INLINE_BYTES = 16 << 10
"""Frames of at most this size together are kept in their row: one write instead of three calls."""

Frame = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FrameFile:
    """Frames one behind the other in a file."""

    path: Path
    lengths: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(self.lengths)

    def write(self, frames: Sequence[Frame], durable: bool) -> None:
        """Write the file; `durable` waits until it survives the loss of power.

        Raises `OSError`, and leaves nothing behind.
        """
        temporary = self.path.with_name(self.path.name + ".part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            with io.FileIO(os.open(temporary, flags, 0o600), "w") as file:
                for frame in frames:
                    _write_all(file.fileno(), memoryview(frame).cast("B"))
                if durable:
                    os.fsync(file.fileno())
            temporary.rename(self.path)
            if durable:
                _sync_directory(self.path.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read(self) -> tuple[memoryview, ...]:
        """The frames; raises `StorageFailed` where they are not what was written."""
        try:
            data = memoryview(self.path.read_bytes())
        except OSError as error:
            raise StorageFailed(
                f"cannot read {self.path}: {error.strerror}", details={"path": str(self.path)}
            ) from error
        if len(data) != self.size_bytes:
            raise StorageFailed(
                f"{self.path} has {len(data)} bytes instead of {self.size_bytes}",
                hint="the machine lost power, or something else changed the file",
                details={"path": str(self.path)},
            )
        return split(data, self.lengths)

    def read_piece(self, number: int, offset: int, most_bytes: int) -> bytes:
        """At most so many bytes of one frame; raises `StorageFailed` as `read` does."""
        start = sum(self.lengths[:number]) + offset
        wanted = min(most_bytes, self.lengths[number] - offset)
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(descriptor, wanted, start)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageFailed(
                f"cannot read {self.path}: {error.strerror}", details={"path": str(self.path)}
            ) from error
        if len(data) != wanted:
            raise StorageFailed(
                f"{self.path} ends before byte {start + wanted}",
                hint="the machine lost power, or something else changed the file",
                details={"path": str(self.path)},
            )
        return data


def lengths_of(frames: Iterable[Frame]) -> tuple[int, ...]:
    """The bytes of each frame."""
    return tuple(memoryview(frame).nbytes for frame in frames)


def split(data: memoryview, lengths: Iterable[int]) -> tuple[memoryview, ...]:
    """Part what was written one behind the other."""
    frames, start = [], 0
    for length in lengths:
        frames.append(data[start : start + length])
        start += length
    return tuple(frames)


def pack_lengths(lengths: Sequence[int]) -> bytes:
    """Lengths as a column of the database."""
    return msgspec.msgpack.encode(lengths)


NO_LENGTHS = pack_lengths(())


def unpack_lengths(column: bytes) -> tuple[int, ...]:
    """Lengths from a column of the database."""
    return msgspec.msgpack.decode(column, type=tuple[int, ...])


def _write_all(descriptor: int, rest: memoryview) -> None:
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
