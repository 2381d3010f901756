"""A memory cgroup for one process tree, on version 1 or 2 of the kernel's interface."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A directory whose `cgroup.procs` a process enters by writing its pid there."""

    path: Path
    peak_file: str

    @property
    def peak_bytes(self) -> int:
        """The most memory, page cache included, that was charged at once."""
        return int((self.path / self.peak_file).read_text(encoding="ascii"))


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A new cgroup with that limit; removed afterwards, when its processes must have ended.

    Raises OSError where this user may not make one.
    """
    is_version_1 = (ROOT / "memory").is_dir()
    parent = ROOT / "memory" if is_version_1 else ROOT
    limit_file = "memory.limit_in_bytes" if is_version_1 else "memory.max"
    peak_file = "memory.max_usage_in_bytes" if is_version_1 else "memory.peak"
    path = parent / f"offloadd-bench-{os.getpid()}"
    path.mkdir()
    try:
        (path / limit_file).write_text(str(limit_bytes), encoding="ascii")
        yield MemoryCgroup(path, peak_file)
    finally:
        path.rmdir()
