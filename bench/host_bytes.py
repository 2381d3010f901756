"""What processes hold of the host's memory: anonymous pages, and each memfd once.

Private pages of files are told beside it: they are a cache as long as nobody else wants them.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

_EVERY_S = 0.02
_LOOKS_PER_TREE = 25
_FIELD = re.compile(r"^(RssAnon|RssFile):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HostBytes:
    """`held` is RssAnon over all processes and the blocks of each memfd once."""

    held: int
    file: int


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def host_bytes(pids: Iterable[int]) -> HostBytes:
    """What these processes hold now; those that have ended hold nothing."""
    held = file = 0
    memfds: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            found = dict(_FIELD.findall(Path(f"/proc/{pid}/status").read_text()))
            memfds |= _memfds(pid)
        except OSError:
            continue
        held += int(found.get("RssAnon", 0)) * 1024
        file += int(found.get("RssFile", 0)) * 1024
    return HostBytes(held + sum(memfds.values()), file)


def open_descriptors(pids: Iterable[int]) -> int:
    """How many descriptors these processes have."""
    return sum(1 for pid in pids for _ in Path(f"/proc/{pid}/fd").iterdir())


class Peak:
    """Looks every 20 ms at what a process tree holds, within a `with` block.

    Which processes are in it is looked up more seldom, since that reads the whole of /proc: done
    each time it took a quarter of a core from what was being measured.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.before = host_bytes(tree(pid))
        self.held = self.file = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @property
    def grown_bytes(self) -> int:
        """The most that was held at once above what was held before."""
        return self.held - self.before.held

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        pids: list[int] = []
        for look in itertools.count():
            if self._is_over.wait(_EVERY_S):
                break
            if look % _LOOKS_PER_TREE == 0:
                pids = tree(self._pid)
            now = host_bytes(pids)
            self.held, self.file = max(self.held, now.held), max(self.file, now.file)


def _memfds(pid: int) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("/memfd:"):
                status = entry.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return found
