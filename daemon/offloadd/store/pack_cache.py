"""The cache directory of packs: where it is, and what is cleared out of it when the daemon starts.

Promises: a pack goes only if it can be written again or never serves again, and only while nobody
has it open. Which files a pack was made from stands in its header.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from offload_protocol.errors import OffloadError
from offload_protocol.sizes import parse_size_bytes
from offloadd.store.index import FileIdentity, IndexedFile
from offloadd.store.index.weight_file import read_weight_file
from offloadd.store.pack import clean_leftovers

SOURCES_KEY = "offloadd.sources"
"""Of a pack's metadata."""


class SourceFile(msgspec.Struct, frozen=True):
    """A file that a pack was made from, in the state that it had."""

    path: str
    state: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, file: IndexedFile) -> SourceFile:
        return cls(str(file.path), _state(file.identity))

    @property
    def is_as_it_was(self) -> bool:
        """Whether the file is still there and nothing was done to it."""
        try:
            return _state(FileIdentity.of(os.stat(self.path))) == self.state  # noqa: PTH116
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was deleted."""

    packs: int = 0
    size_bytes: int = 0


def cache_directory() -> Path:
    """Where packs go unless a model says otherwise: the service's or the user's cache."""
    if given := os.environ.get("CACHE_DIRECTORY"):
        # systemd separates several directories by colons.
        return Path(given.partition(":")[0]) / "packs"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "offloadd" / "packs"


def pack_metadata(files: Sequence[SourceFile]) -> dict[str, str]:
    """What a pack's header says of the files that it is made from."""
    return {SOURCES_KEY: msgspec.json.encode(files).decode()}


def size_limit_bytes(directory: Path, setting: str) -> int:
    """What all packs may take; a share (`50%`) is one of the file system that they are on."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    status = os.statvfs(place)
    return parse_size_bytes(setting, whole_bytes=status.f_blocks * status.f_frsize)


def clear_out(directory: Path, limit_bytes: int) -> Cleared:
    """Delete packs whose files are gone or changed, and beyond the limit those read longest ago.

    Raises `OSError` where the directory cannot be read or written.
    """
    if not directory.is_dir():
        return Cleared()
    clean_leftovers(directory)
    packs = sorted(directory.glob("*.safetensors"), key=lambda path: path.stat().st_atime)
    left_bytes = sum(path.stat().st_size for path in packs)
    cleared = Cleared()
    for path in packs:
        size_bytes = path.stat().st_size
        if (left_bytes > limit_bytes or not may_serve(path)) and _delete(path):
            left_bytes -= size_bytes
            cleared = Cleared(cleared.packs + 1, cleared.size_bytes + size_bytes)
    return cleared


def may_serve(pack: Path) -> bool:
    """Whether the files that a pack was made from are as they were."""
    try:
        told = read_weight_file(pack).metadata.get(SOURCES_KEY, "")
        files = msgspec.json.decode(told, type=list[SourceFile])
    except (OffloadError, msgspec.DecodeError):
        # Damaged, or of a version that named packs otherwise.
        return False
    return all(file.is_as_it_was for file in files)


def _delete(path: Path) -> bool:
    with _nobody_else_has_it(path) as is_free:
        if is_free:
            path.unlink()
        return is_free


@contextmanager
def _nobody_else_has_it(path: Path) -> Iterator[bool]:
    """Whether no other descriptor of a file is open: only then is there a write lease."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        is_free = True
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        os.close(descriptor)


def _state(it: FileIdentity) -> tuple[int, int, int, int, int]:
    return (it.device, it.inode, it.size_bytes, it.mtime_ns, it.ctime_ns)
