"""How much host memory weights may take: measured on the machine and in every control group above.

Reading is `measure`; what it reads is parsed by pure functions. Measured anew at each decision,
because other programs come and go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from offload_protocol.sizes import parse_size_bytes

_SMALLEST_RESERVE_BYTES = 512 << 20
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 of control groups writes "no limit" as a number near 2^63."""


@dataclass(frozen=True, slots=True)
class HostRoom:
    """The memory that this process can have at all, and what of it is free or can be freed."""

    total_bytes: int
    available_bytes: int

    @property
    def reserve_bytes(self) -> int:
        """What stays free for everything that is not weights: activations, libraries, others.

        A twentieth, at least 512 MiB, but never more than a quarter of all.
        """
        wanted = max(self.total_bytes // 20, _SMALLEST_RESERVE_BYTES)
        return min(wanted, self.total_bytes // 4)


def budget_bytes(room: HostRoom, held_bytes: int, setting: str) -> int:
    """The budget for weights, of which `held_bytes` are in memory already.

    That is what they take plus what is available, less the reserve; `setting` (`8GiB`, `80%` of
    all memory, or empty) lowers it and never raises it. Raises `InvalidRequest` for a setting that
    is no size.
    """
    measured = max(held_bytes + room.available_bytes - room.reserve_bytes, 0)
    if not setting:
        return measured
    return min(measured, parse_size_bytes(setting, room.total_bytes))


def measure(root: Path = Path("/")) -> HostRoom:
    """The machine's memory within the limits of this process's control groups (versions 1 and 2).

    Raises `OSError` where /proc/meminfo cannot be read; groups that cannot be read don't count.
    """
    meminfo = parse_meminfo((root / "proc/meminfo").read_text())
    total, available = meminfo["MemTotal"], meminfo["MemAvailable"]
    for group in _groups(root):
        limit = _limit(group)
        if limit is not None:
            total = min(total, limit.total_bytes)
            available = min(available, limit.available_bytes)
    return HostRoom(total, available)


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def parse_groups(text: str) -> dict[str, str]:
    """The paths of /proc/self/cgroup: `memory` for version 1, the empty name for version 2."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return {name: path for name, path in found.items() if name in ("", "memory")}


def _groups(root: Path) -> Iterator[Path]:
    """The directories of our groups and of all above them, as far as we can see them."""
    try:
        paths = parse_groups((root / "proc/self/cgroup").read_text())
    except OSError:
        return
    mounts: dict[str, tuple[str, ...]] = {
        "": ("sys/fs/cgroup", "sys/fs/cgroup/unified"),
        "memory": ("sys/fs/cgroup/memory",),
    }
    for name, path in paths.items():
        # Without a namespace a container sees the path that the host has for it, and only its
        # end is mounted here: then the mount's root is our own group.
        own = PurePosixPath("/" + path.lstrip("/"))
        for mount in mounts[name]:
            for group in (own, *own.parents):
                yield root / mount / str(group).lstrip("/")


def _limit(group: Path) -> HostRoom | None:
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    reclaimable: tuple[str, ...] = ("inactive_file", "slab_reclaimable")
    if limit is None:
        limit = _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.usage_in_bytes")
        reclaimable = ("total_inactive_file",)
    if limit is None or used is None or limit >= _NO_LIMIT_BYTES:
        return None
    # The page cache counts as used by the group, and gives way when memory is short.
    stat = _statistics(group / "memory.stat")
    cached = sum(stat.get(name, 0) for name in reclaimable)
    return HostRoom(limit, max(limit - used + cached, 0))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistics(path: Path) -> dict[str, int]:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
