"""Why a worker died, and whether it died of itself: only that counts against the job it ran.

A worker that was killed from outside (an administrator, a test, a shutdown) did nothing wrong. The
kernel's out-of-memory killer also sends SIGKILL; what tells the two apart is the kernel's count.
Where that cannot be read (another cgroup, no such count), a job could have its worker killed for
ever, so being killed from outside has its bound as well. The same bound holds for deaths of which
several jobs, or a job and a load beside it, may be the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload_protocol.errors import WorkerCrashed
from offloadd.control.jobs.jobs import Job

MAX_STRIKES = 2
"""Deaths of their worker's own that a job may cause, the last of which ends it."""

MAX_KILLS = 5
"""Deaths of a worker beside a job, of which it need not be the cause; the last one ends the job."""

FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker; `is_own_fault` says that nobody else ended it."""

    error: WorkerCrashed
    is_own_fault: bool


def suspects(
    going: Sequence[Job], loading: Sequence[Job], loads: Collection[str]
) -> tuple[list[Job], bool]:
    """The jobs of which a worker may have died, and whether it can only have been the one.

    `going` had the device, `loading` had their models loaded, `loads` are the models that clients
    had asked for. Where several jobs had the device, or a model was loaded beside, each is alone
    from now on, so that the next time it is known.
    """
    models = {*loads, *(job.request.model for job in loading)}
    is_only_one = len(going) + len(models) <= 1
    found = [*going, *loading]
    for job in found:
        job.is_alone = job.is_alone or not is_only_one
    return found, is_only_one


def blame(job: Job, death: Death, is_only_suspect: bool = True) -> WorkerCrashed | None:
    """Note a death with which the job had to do; gives its end if that was once too often."""
    if death.is_own_fault and is_only_suspect:
        job.strikes += 1
        return death.error if job.strikes >= MAX_STRIKES else None
    job.kills += 1
    if job.kills < MAX_KILLS:
        return None
    return WorkerCrashed(
        f"the worker died {job.kills} times beside this job, the last time so: "
        f"{death.error.message}",
        hint="look whether the kernel had no memory left (journalctl -k), and draw smaller",
        details={**death.error.details, "kills": job.kills},
    )


class OomCount:
    """Counts what the kernel's out-of-memory killer has killed in our cgroup, else anywhere.

    `proc` and `cgroups` are where those file systems are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._files = [*_cgroup_files(proc, cgroups), proc / "vmstat"]

    def read(self) -> int:
        """The count now; 0 where the kernel does not tell."""
        for file in self._files:
            try:
                match = _COUNT.search(file.read_text())
            except OSError:
                continue
            if match is not None:
                return int(match[1])
        return 0


def death(exit_code: int, last_line: str, spoke_nonsense: bool, was_out_of_memory: bool) -> Death:
    """Judge an exit code (below 0: a signal); `was_out_of_memory` is what `OomCount` showed."""
    details: dict[str, object] = {"last_line": last_line}
    is_own_fault = True
    if spoke_nonsense:
        how = "sent a message that cannot be read"
    elif exit_code >= 0:
        details["exit_code"] = exit_code
        how = f"ended with exit code {exit_code}"
    else:
        name = _signal_name(-exit_code)
        details["signal"] = name
        how = f"was killed by {name}"
        is_own_fault = -exit_code not in FROM_OUTSIDE
        if -exit_code == signal.SIGKILL and was_out_of_memory:
            is_own_fault = True
            details["out_of_memory"] = True
            how += " from the kernel, which had no memory left"
    said = f"; its last line: {last_line}" if last_line else ""
    error = WorkerCrashed(
        f"the worker process {how}{said}",
        hint="the daemon's log has what it wrote; a new worker is started",
        details=details,
    )
    return Death(error, is_own_fault)


def _cgroup_files(proc: Path, cgroups: Path) -> list[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
