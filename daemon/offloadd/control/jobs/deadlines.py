"""Ends jobs whose time is over: they have waited, or have had the device, for too long."""

from __future__ import annotations

from collections.abc import Callable

from offload_protocol.errors import DeadlineExceeded, OffloadError
from offloadd.control.jobs.jobs import Job, JobTable
from offloadd.control.scheduling.scheduler import Scheduler
from offloadd.control.scheduling.turns import Turns


class Deadlines:
    """Of the jobs of one worker; `cancel` ends a job for a reason."""

    def __init__(
        self,
        scheduler: Scheduler,
        table: JobTable,
        turns: Turns,
        cancel: Callable[[Job, OffloadError], None],
    ) -> None:
        self._scheduler = scheduler
        self._table = table
        self._turns = turns
        self._cancel = cancel

    def enforce(self, now_s: float) -> None:
        """End what is overdue."""
        for key in self._scheduler.expired(now_s):
            job = self._table.get(key)
            if job is not None:
                self._cancel(job, _waited(job.request.queue_timeout_s))
        for job in self._turns.going():
            run_s = job.request.run_timeout_s
            if run_s is not None and job.device_s(now_s) >= run_s and not job.stopping:
                self._cancel(job, _ran(run_s))


def _waited(most_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the job waited longer than {most_s} s",
        hint="allow more as queue_timeout_s, or ask when fewer jobs wait",
    )


def _ran(most_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the job had the device for longer than {most_s} s",
        hint="allow more as run_timeout_s, or draw smaller or with fewer steps",
    )
