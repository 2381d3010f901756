"""Works out where each waiting job stands and when it may start, and tells who asked for it."""

from __future__ import annotations

from collections.abc import Callable

from offloadd.control.jobs.endings import Watchers
from offloadd.control.jobs.estimates import Estimates, steps_of
from offloadd.control.jobs.jobs import Job, JobTable
from offloadd.control.scheduling.scheduler import Scheduler

TELLING_SHARE = 0.05
"""Of the loop's time, for telling places."""


class Places:
    """Places of the jobs in one queue; `estimates` learns from jobs that have ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        table: JobTable,
        watchers: Watchers,
        clock: Callable[[], float],
    ) -> None:
        self.estimates = Estimates()
        self._scheduler = scheduler
        self._table = table
        self._watchers = watchers
        self._clock = clock
        self._are_old = False
        self._not_before_s = 0.0

    def changed(self) -> None:
        """Some job came, started or left."""
        self._are_old = True

    def tell(self, running: Job | None) -> None:
        """Tell each job's new place, if anything changed.

        For a long queue that takes long, so it is told the less often: it has a share of the time.
        """
        start_s = self._clock()
        if not self._are_old or start_s < self._not_before_s:
            return
        self._are_old = False
        busy_s = 0.0
        if running is not None:
            busy_s = self.expected_s(running)
        for place in self._scheduler.places(self._clock(), busy_s):
            job = self._table.get(place.job)
            if job is not None and job.state == "queued":
                has_moved = job.position != place.position
                job.position, job.starts_in_s = place.position, place.starts_in_s
                if has_moved:
                    self._watchers.job_moved(job)
        self._not_before_s = start_s + (self._clock() - start_s) / TELLING_SHARE

    def expected_s(self, job: Job) -> float:
        """How long a job will have the device from now on."""
        whole_s = self.estimates.expected_s(job.request.model, steps_of(job.request.arguments))
        return max(whole_s - job.device_s(self._clock()), 0.0)
