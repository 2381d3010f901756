"""The host budget follows the machine and the tightest control group, of either version."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_protocol.errors import InvalidRequest
from offloadd.control.memory.host_budget import HostRoom, budget_bytes, measure

GIB = 1 << 30


def machine(root: Path, total_gib: int, available_gib: int, groups: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    kib = 1 << 20
    (root / "proc/meminfo").write_text(
        f"MemTotal: {total_gib * kib} kB\nMemFree: 1 kB\nMemAvailable: {available_gib * kib} kB\n"
        "HugePages_Total: 0\n"
    )
    (root / "proc/self/cgroup").write_text(groups)
    return root


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert measure(machine(tmp_path, 64, 40)) == HostRoom(64 * GIB, 40 * GIB)


def test_the_tightest_group_above_us_limits(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, 40, "0::/system.slice/offloadd.service\n")
    slice_ = root / "sys/fs/cgroup/system.slice"
    write(slice_, memory__max=16 * GIB, memory__current=10 * GIB)
    write(slice_ / "offloadd.service", memory__max="max", memory__current=2 * GIB)
    assert measure(root) == HostRoom(16 * GIB, 6 * GIB)


def test_cached_file_pages_of_a_group_count_as_free(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, 40, "0::/a\n")
    stat = f"anon {GIB}\ninactive_file {3 * GIB}\nslab_reclaimable 0"
    group = root / "sys/fs/cgroup/a"
    write(group, memory__max=8 * GIB, memory__current=6 * GIB, memory__stat=stat)
    assert measure(root).available_bytes == 5 * GIB


def test_version_1_limits_too_and_its_huge_number_is_none(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, 40, "12:cpu,cpuacct:/x\n9:memory:/jobs/x\n")
    jobs = root / "sys/fs/cgroup/memory/jobs"
    write(jobs, memory__limit_in_bytes=0x7FFFFFFFFFFFF000, memory__usage_in_bytes=GIB)
    assert measure(root) == HostRoom(64 * GIB, 40 * GIB)
    write(
        jobs / "x",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"total_inactive_file {GIB}",
    )
    assert measure(root) == HostRoom(4 * GIB, 2 * GIB)


def test_in_a_container_the_mounts_root_is_our_own_group(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, 40, "9:memory:/docker/0123\n")
    write(
        root / "sys/fs/cgroup/memory",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
    )
    assert measure(root) == HostRoom(2 * GIB, GIB)


def test_the_budget_is_what_is_held_and_free_less_a_reserve() -> None:
    room = HostRoom(total_bytes=100 * GIB, available_bytes=30 * GIB)
    assert budget_bytes(room, held_bytes=20 * GIB, setting="") == 45 * GIB


def test_a_setting_lowers_the_budget_and_never_raises_it() -> None:
    room = HostRoom(total_bytes=100 * GIB, available_bytes=30 * GIB)
    assert budget_bytes(room, 20 * GIB, "8GiB") == 8 * GIB
    assert budget_bytes(room, 20 * GIB, "10%") == 10 * GIB
    assert budget_bytes(room, 20 * GIB, "90%") == 45 * GIB
    with pytest.raises(InvalidRequest, match="not a size"):
        budget_bytes(room, 0, "much")


def test_a_full_machine_leaves_no_budget_rather_than_a_negative_one() -> None:
    assert budget_bytes(HostRoom(64 * GIB, 0), held_bytes=GIB, setting="") == 0


def test_the_reserve_of_a_small_group_leaves_most_of_it() -> None:
    assert HostRoom(GIB, GIB).reserve_bytes == GIB // 4


def test_the_real_machine_can_be_measured() -> None:
    room = measure()
    assert 0 < room.available_bytes <= room.total_bytes
