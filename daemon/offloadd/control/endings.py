"""What the end of a job brings about: its result is kept, it is counted, its watchers are told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from offload_protocol import codec
from offload_protocol.errors import Cancelled, OffloadError
from offload_protocol.messages import Finished, Outcome
from offloadd.control.jobs import Job, JobTable
from offloadd.control.results import Results, encoded

FIRST_GUESS_S = 5.0
"""How long a job takes, before one has ended."""

WEIGHT_OF_LATEST = 0.2

_log = logging.getLogger(__name__)


class Watchers(Protocol):
    """Who tells clients about their jobs."""

    def job_moved(self, job: Job) -> None:
        """Its state, step or position changed."""

    def job_finished(self, job: Job) -> None:
        """It has ended; its end is in the results."""


@dataclass(slots=True)
class Totals:
    """Jobs that have ended since the daemon started."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0


class Endings:
    """Ends jobs, each once. `on_unused` is called with a model that no job needs any longer."""

    def __init__(
        self,
        results: Results,
        keep_s: float,
        clock: Callable[[], float],
        watchers: Watchers,
        on_unused: Callable[[str], None],
    ) -> None:
        self.table = JobTable()
        self.totals = Totals()
        self._results = results
        self._keep_s = keep_s
        self._clock = clock
        self._watchers = watchers
        self._on_unused = on_unused
        self._typical_s = FIRST_GUESS_S

    @property
    def retry_after_s(self) -> float:
        """When a place in a full queue is likely to be free: after a typical job."""
        return max(self._typical_s, 1.0)

    def has_result(self, job: Job) -> bool:
        """The job's end is still kept."""
        return self._results.get(job.key) is not None

    def complete(self, job: Job, outcome: Outcome, frames: Sequence[bytes]) -> None:
        """The job has made something."""
        waited_s = job.timings(self._clock()).queued_s
        timings = msgspec.structs.replace(outcome.timings, queued_s=waited_s)
        outcome = msgspec.structs.replace(outcome, timings=timings)
        self.totals.completed += 1
        self._end(job, Finished(job=job.request.job, state="done", outcome=outcome), frames)

    def fail(self, job: Job, error: OffloadError) -> None:
        """The job has failed, or was cancelled."""
        info = codec.error_info(error)
        if isinstance(error, Cancelled):
            self.totals.cancelled += 1
            self._end(job, Finished(job=job.request.job, state="cancelled", error=info), ())
        else:
            self.totals.failed += 1
            self._end(job, Finished(job=job.request.job, state="failed", error=info), ())

    def forget_old(self, now_s: float) -> None:
        """Forget what ended too long ago."""
        for key in self.table.expired(now_s - self._keep_s):
            self._forget(key)

    def _end(self, job: Job, finished: Finished, frames: Sequence[bytes]) -> None:
        now_s = self._clock()
        job.state, job.ended_s, job.position = finished.state, now_s, None
        job.release_request()
        if job.started_s is not None:
            took_s = now_s - job.started_s
            self._typical_s += WEIGHT_OF_LATEST * (took_s - self._typical_s)
        self._results.keep(job.key, encoded(finished, frames))
        for key in self.table.ended(job):
            self._forget(key)
        self._watchers.job_finished(job)
        if not self.table.uses(job.request.model):
            self._on_unused(job.request.model)
        _log.info(
            "job %s of uid %d on %s: %s",
            job.request.job,
            job.owner.uid,
            job.request.model,
            finished.error.message if finished.error else "done",
        )

    def _forget(self, key: str) -> None:
        self.table.remove(key)
        self._results.drop(key)
