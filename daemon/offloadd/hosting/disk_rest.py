"""Directories where offloaded groups rest on disk: one for each loaded component, gone with it.

diffusers names a group's file by the module's path alone and takes a file that exists for its own,
so a directory that two components, models or runs shared would silently mix their weights. Here
each component of each load gets a new directory; a lock that dies with its process marks it as in
use, and what a killed process left is removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from offload_protocol.errors import OffloadError, StorageFailed
from offload_protocol.sizes import format_size

_PREFIX = "offloadd-"
_LOCK = "in-use"
_RESERVE_BYTES = 64 << 20


class DiskRest:
    """The directory of one load of one model below a path that the user chose."""

    def __init__(self, parent: Path) -> None:
        """Create the directory; raises `StorageFailed` where that is not possible."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            # mkdtemp's mode is 0700: what lies here is read as weights.
            self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = os.open(self._root / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise disk_error(parent, error) from error

    def component(self, name: str, size_bytes: int) -> Path:
        """A directory for one component; raises `StorageFailed` if the disk has no room for it."""
        free = shutil.disk_usage(self._root).free
        if size_bytes + _RESERVE_BYTES > free:
            raise StorageFailed(
                f"{self._root.parent} has {format_size(free)} free, and {name!r} needs "
                f"{format_size(size_bytes)} there",
                hint="free some space, or choose another offload_to_disk_path",
                details={"path": str(self._root.parent), "needed_bytes": size_bytes, "free": free},
            )
        directory = self._root / name
        directory.mkdir()
        return directory

    def remove(self) -> None:
        """Delete the directory and everything in it."""
        shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._lock)


def disk_error(path: Path, error: OSError) -> OffloadError:
    """The error for a disk that refuses: names the path and the reason."""
    return StorageFailed(
        f"{path} cannot hold offloaded weights: {error.strerror or error}",
        hint="check the disk's space and permissions, or choose another offload_to_disk_path",
        details={"path": str(path), "errno": error.errno},
    )


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Another user's, or one that is being made or removed just now.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
