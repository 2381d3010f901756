"""What the end of a job brings about: it is written down, its result kept, its watchers told.

They are told once the journal has it, so that what a client has seen is not forgotten; where the
journal cannot take it, they are told all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from offload_protocol import codec
from offload_protocol.errors import Cancelled, OffloadError, StorageFailed
from offload_protocol.messages import Finished
from offload_protocol.records import ErrorInfo, JobState, Outcome
from offloadd.control.clocks import Clocks
from offloadd.control.jobs.jobs import Job, JobTable
from offloadd.control.jobs.results import Result, Results, encoded, recovered
from offloadd.control.journal.frames import Frame, FrameFile
from offloadd.control.journal.journal import Journal
from offloadd.control.journal.reading import EndedJob

_log = logging.getLogger(__name__)


class Watchers(Protocol):
    """Who tells clients about their jobs."""

    def job_moved(self, job: Job) -> None:
        """Its state, step or position changed."""

    def job_shown(self, job: Job, preview: dict[str, Any], frames: Sequence[Frame]) -> None:
        """There is a picture of how far it is: an image value and its frame."""

    def job_finished(self, job: Job) -> None:
        """It has ended; its end is in the results."""


@dataclass(slots=True)
class Totals:
    """Jobs that have ended since the daemon started."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    requeued: int = 0


class Endings:
    """Ends jobs, each once; `on_ended` is called with each."""

    def __init__(
        self,
        results_max_bytes: int,
        keep_s: float,
        clocks: Clocks,
        journal: Journal,
        watchers: Watchers,
        on_ended: Callable[[Job], None],
    ) -> None:
        self.table = JobTable()
        self.totals = Totals()
        self.results = Results(results_max_bytes, self._gave_way)
        self._keep_s = keep_s
        self._clock = clocks.monotonic_s
        self._wall_clock = clocks.wall_s
        self._journal = journal
        self._watchers = watchers
        self._on_ended = on_ended
        self._waiting_for_all: list[asyncio.Future[None]] = []

    def recover(self, job: Job, ended: EndedJob) -> None:
        """Remember a job that ended before this daemon started."""
        job.state = ended.state
        job.ended_s = min(self._clock() - (self._wall_clock() - ended.ended_at), self._clock())
        job.is_written = job.end_is_written = True
        job.release_request()
        self.table.add(job)
        if ended.body is not None:
            result = recovered(job.request.job, ended.body, ended.frames, ended.file)
            self.results.keep(job.key, result)
        too_old = self.table.ended(job)
        if ended.body is None:
            self.table.taken(job)
        for key in too_old:
            self._forget(key)

    def has_result(self, job: Job) -> bool:
        """The job's end is still kept."""
        return job.key in self.results

    def all_ended(self) -> asyncio.Future[None]:
        """Done when no job is left that has not ended."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_for_all.append(future)
        self._tell_whether_all_ended()
        return future

    def close(self, error: OffloadError) -> None:
        """Answer those who wait for the end of all jobs."""
        waiting, self._waiting_for_all = self._waiting_for_all, []
        for future in waiting:
            future.set_exception(error)

    def disown(self, job: Job) -> None:
        """A job could not be written down, so it never was."""
        job.is_void = True
        self.table.remove(job.key)
        self.results.drop(job.key)
        self._tell_whether_all_ended()

    def taken(self, job: Job, told: Callable[[None], None] | None = None) -> None:
        """A client has the result; what stays is the memory of its id. `told` is called then."""
        self.results.drop(job.key)
        self.table.taken(job)
        # What cannot be written now is owed, and nothing that a client could do anything about.
        written = None if told is None else lambda _: told(None)
        self._journal.taken(job.number, self._wall_clock(), written)

    def complete(self, job: Job, outcome: Outcome, frames: Sequence[Frame]) -> None:
        """The job has made something."""
        seen = job.timings(self._clock())
        timings = msgspec.structs.replace(
            outcome.timings, queued_s=seen.queued_s, parked_s=seen.parked_s
        )
        outcome = msgspec.structs.replace(outcome, timings=timings)
        self.totals.completed += 1
        self._end(job, Finished(job=job.request.job, state="done", outcome=outcome), frames)

    def fail(self, job: Job, error: OffloadError) -> None:
        """The job has failed, or was cancelled."""
        if isinstance(error, Cancelled):
            self.totals.cancelled += 1
        else:
            self.totals.failed += 1
        self._end(job, _without_result(job, error), ())

    def will_end(self, job: Job, error: OffloadError) -> None:
        """The worker was told to stop the job: if this daemon ends first, it has ended so.

        Its real end takes the place of this one.
        """
        finished = _without_result(job, error)
        result = encoded(finished, ())
        self._journal.end(
            *(job.number, job.request, finished.state, self._wall_clock()),
            *(result.body, result.frames, lambda error: None),
        )

    def forget_old(self, now_s: float) -> None:
        """Forget what ended too long ago."""
        for key in self.table.expired(now_s - self._keep_s):
            self._forget(key)

    def _end(self, job: Job, finished: Finished, frames: Sequence[Frame]) -> None:
        job.state, job.ended_s, job.position = finished.state, self._clock(), None
        job.used_s, job.turn_since_s = job.device_s(job.ended_s), None
        job.release_request()
        result = encoded(finished, frames)
        self.results.keep(job.key, result)
        for key in self.table.ended(job):
            self._forget(key)
        self._write(job, result, finished.error)
        self._on_ended(job)
        self._tell_whether_all_ended()

    def _tell_whether_all_ended(self) -> None:
        if self._waiting_for_all and not self.table.has_live():
            waiting, self._waiting_for_all = self._waiting_for_all, []
            for future in waiting:
                future.set_result(None)

    def _write(self, job: Job, result: Result, reason: ErrorInfo | None) -> None:
        file: FrameFile | None = None

        def written(error: StorageFailed | None) -> None:
            job.end_is_written = True
            if job.is_void:
                return
            self._watchers.job_finished(job)
            # Behind the news, since a line takes as long as a small job's whole turn here.
            _log_end(job, reason)
            if file is not None and error is None:
                self.results.is_on_disk(job.key, file)

        file = self._journal.end(
            *(job.number, job.request, job.state, self._wall_clock()),
            *(result.body, result.frames, written),
        )

    def _gave_way(self, key: str, new: Result) -> None:
        job = self.table.get(key)
        if job is not None:
            self._journal.replace_result(job.number, new.body)

    def _forget(self, key: str) -> None:
        job = self.table.get(key)
        if job is not None:
            self.table.remove(key)
            self.results.drop(key)
            self._journal.forget(job.number, job.owner.user, job.request.job)


def _without_result(job: Job, error: OffloadError) -> Finished:
    state: JobState = "cancelled" if isinstance(error, Cancelled) else "failed"
    return Finished(job=job.request.job, state=state, error=codec.error_info(error))


def _log_end(job: Job, reason: ErrorInfo | None) -> None:
    _log.info(
        "job %s of user %s on %s: %s",
        *(job.request.job, job.owner.user, job.request.model),
        reason.message if reason is not None else "done",
    )
