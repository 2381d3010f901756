"""Whose fault a worker's death was, from its exit code and the kernel's count."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from control.test_jobs import job

from offloadd.control.workers.deaths import MAX_KILLS, MAX_STRIKES, OomCount, blame, death


@pytest.mark.parametrize(
    ("exit_code", "nonsense", "out_of_memory", "own_fault", "says"),
    [
        (1, False, False, True, "ended with exit code 1; its last line: last words"),
        (0, False, False, True, "ended with exit code 0"),
        (-signal.SIGSEGV, False, False, True, "was killed by SIGSEGV"),
        (-signal.SIGABRT, False, False, True, "was killed by SIGABRT"),
        (-signal.SIGKILL, False, False, False, "was killed by SIGKILL"),
        (-signal.SIGTERM, False, False, False, "was killed by SIGTERM"),
        (-signal.SIGTERM, False, True, False, "was killed by SIGTERM"),
        (-signal.SIGKILL, False, True, True, "from the kernel, which had no memory left"),
        (-signal.SIGKILL, True, False, True, "sent a message that cannot be read"),
        (-99, False, False, True, "was killed by signal 99"),
    ],
)
def test_only_a_death_of_itself_is_the_workers_fault(
    exit_code: int, nonsense: bool, out_of_memory: bool, own_fault: bool, says: str
) -> None:
    end = death(exit_code, "last words", nonsense, out_of_memory)
    assert end.is_own_fault == own_fault
    assert says in end.error.message


def kernel(directory: Path, cgroup: str, files: dict[str, str]) -> OomCount:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return OomCount(directory / "proc", directory / "cgroup")


def test_the_count_is_that_of_our_cgroup(tmp_path: Path) -> None:
    events = "low 0\noom 5\noom_kill 3\noom_group_kill 0\n"
    files = {"cgroup/system.slice/x/memory.events": events, "proc/vmstat": "oom_kill 9\n"}
    assert kernel(tmp_path, "0::/system.slice/x\n", files).read() == 3


def test_the_first_version_of_cgroups_has_it_elsewhere(tmp_path: Path) -> None:
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    files = {"cgroup/memory/docker/x/memory.oom_control": control}
    lines = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n"
    assert kernel(tmp_path, lines, files).read() == 2


def test_without_a_cgroup_of_our_own_the_whole_machine_counts(tmp_path: Path) -> None:
    files = {"proc/vmstat": "nr_free_pages 7\noom_kill 9\n"}
    assert kernel(tmp_path, "0::/\n", files).read() == 9


def test_a_kernel_that_does_not_tell_counts_as_nothing_killed(tmp_path: Path) -> None:
    assert OomCount(tmp_path, tmp_path).read() == 0


def test_a_job_may_cause_so_many_deaths() -> None:
    one, end = job("a"), death(-signal.SIGSEGV, "", False, False)
    assert [blame(one, end) for _ in range(MAX_STRIKES)] == [None, end.error]


def test_a_worker_that_is_killed_again_and_again_under_one_job_ends_it() -> None:
    # A container whose kernel does not show the count of its out-of-memory killer, for one.
    one, end = job("a"), death(-signal.SIGKILL, "", False, False)
    for _ in range(MAX_KILLS - 1):
        assert blame(one, end) is None
    error = blame(one, end)
    assert error is not None
    assert f"died {MAX_KILLS} times" in error.message
    assert error.details["signal"] == "SIGKILL"
    assert one.strikes == 0


def test_a_death_that_may_be_anothers_is_no_strike_but_is_counted() -> None:
    one, end = job("a"), death(-signal.SIGSEGV, "", False, False)
    assert blame(one, end, is_only_suspect=False) is None
    assert (one.strikes, one.kills) == (0, 1)
