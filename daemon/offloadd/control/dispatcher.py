"""Moves jobs through their states: accepted, queued, on the worker, ended, forgotten.

Invariants:
- A job ends exactly once, whichever of worker, client, clock and shutdown comes first.
- At most one job is on the worker. A message of the worker about any other job is out of date.
- What is checked is checked before a job is queued, or, while its model is not described yet,
  before it is started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from offload_protocol import codec
from offload_protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorCode,
    IdConflict,
    OffloadError,
    WorkerCrashed,
)
from offload_protocol.messages import Finished, JobState, Submit
from offloadd.channel.messages import CancelJob, JobEnded, JobProgressed, RunJob, ToWorker
from offloadd.control.admission import Admission, Clocks
from offloadd.control.jobs import Job, JobTable, Owner, check_id, fingerprint, job_key
from offloadd.control.models import HostedModel, ModelTable
from offloadd.control.results import Results, encoded
from offloadd.control.scheduler import Scheduler, Ticket

FIRST_GUESS_S = 5.0
"""How long a job takes, before one has ended."""

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


class Dispatcher:
    """The jobs of one worker. `order` hands a message and frames to it."""

    def __init__(
        self,
        scheduler: Scheduler,
        models: ModelTable,
        results: Results,
        admission: Admission,
        clocks: Clocks,
        keep_s: float,
        watchers: Watchers,
        order: Callable[[ToWorker, Sequence[memoryview]], None],
    ) -> None:
        self.table = JobTable()
        self.totals = Totals()
        self.running: Job | None = None
        self._scheduler = scheduler
        self._models = models
        self._results = results
        self._admission = admission
        self._keep_s = keep_s
        self._clocks = clocks
        self._watchers = watchers
        self._order = order
        self._has_worker = False
        self._refusal: OffloadError | None = None
        self._positions_are_old = False
        self._typical_s = FIRST_GUESS_S

    # --- what clients ask -----------------------------------------------------------------------

    def submit(self, owner: Owner, request: Submit, frames: Sequence[memoryview]) -> Job:
        """Accept a job, or find the one that was accepted before by the same id and request.

        Raises `IdConflict`, `Busy`, what `refuse` was given, and what `Admission.admit` raises.
        """
        check_id(request.job)
        key, mark = job_key(owner.uid, request.job), fingerprint(request, frames)
        known = self.table.get(key)
        if known is not None:
            return self._said_again(known, owner, mark)
        if self._refusal is not None:
            raise self._refusal
        job = self._admission.admit(owner, request, frames, mark)
        now_s, wait_s = job.submitted_s, request.queue_timeout_s
        ticket = Ticket(
            job=key,
            client=owner.client,
            model=request.model,
            submitted_s=now_s,
            priority=request.priority,
            deadline_s=None if wait_s is None else now_s + wait_s,
            size_bytes=sum(len(frame) for frame in frames),
        )
        self._scheduler.add(ticket, retry_after_s=max(self._typical_s, 1.0))
        self.table.add(job)
        job.position = len(self._scheduler)
        self._positions_are_old = True
        self._start_next()
        return job

    def cancel(self, job: Job, reason: OffloadError | None = None) -> None:
        """End a job; nothing happens to one that has ended."""
        reason = reason or Cancelled("the job was cancelled")
        if self._scheduler.remove(job.key):
            self._finish(job, "cancelled" if isinstance(reason, Cancelled) else "failed", reason)
        elif job is self.running:
            job.stopping = job.stopping or reason
            self._order(CancelJob(job=job.key), ())

    def refuse(self, error: OffloadError | None) -> None:
        """From now on, answer every new job with this error, or, with None, accept them again."""
        self._refusal = error

    def end_waiting(self, error: OffloadError) -> None:
        """End all jobs that wait and stop the one that runs."""
        for job in self.table.live():
            self.cancel(job, error)

    def is_used(self, model: str) -> bool:
        """Some job on this model waits or runs."""
        return any(job.request.model == model for job in self.table.live())

    # --- what the worker says -------------------------------------------------------------------

    def worker_ready(self) -> None:
        """A worker takes orders."""
        self._has_worker = True
        self._start_next()

    def worker_lost(self, cause: WorkerCrashed) -> None:
        """The worker has died; the job it ran fails, unless it was to be stopped anyway."""
        self._has_worker = False
        job, self.running = self.running, None
        if job is not None:
            error = job.stopping or cause
            self._finish(job, "cancelled" if isinstance(error, Cancelled) else "failed", error)

    def model_known(self, model: HostedModel) -> None:
        """A model was described, or cannot be: judge the jobs that wait for that."""
        if model.is_registered:
            self._start_next()
        elif model.error is not None and model.described is None:
            error = codec.to_exception(model.error)
            for job in self.table.live():
                if job.request.model == model.spec.name and self._scheduler.remove(job.key):
                    self._finish(job, "failed", error)

    def progressed(self, news: JobProgressed) -> None:
        """The running job has come further."""
        job = self.running
        if job is None or job.key != news.job:
            return
        job.state, job.step, job.steps = news.state, news.step, news.steps
        if news.state == "running" and job.running_since_s is None:
            job.running_since_s = self._clocks.monotonic_s()
        self._watchers.job_moved(job)

    def ended(self, news: JobEnded, frames: Sequence[bytes]) -> None:
        """The running job has ended."""
        job = self.running
        if job is None or job.key != news.job:
            return
        self.running = None
        if news.outcome is not None:
            self._complete(job, news, frames)
        else:
            self._fail(job, news)
        self._start_next()

    # --- what time does -------------------------------------------------------------------------

    def tick(self) -> None:
        """Enforce deadlines, forget what is old, tell who has moved up in the queue."""
        now_s = self._clocks.monotonic_s()
        for key in self._scheduler.expired(now_s):
            job = self.table.get(key)
            if job is not None:
                waited_s = job.request.queue_timeout_s
                self.cancel(job, DeadlineExceeded(f"the job waited longer than {waited_s} s"))
        self._stop_overdue(now_s)
        for key in self.table.expired(now_s - self._keep_s):
            self._forget(key)
        if self._positions_are_old:
            self._tell_positions(now_s)

    def _stop_overdue(self, now_s: float) -> None:
        job = self.running
        if job is None or job.stopping or job.started_s is None:
            return
        run_s = job.request.run_timeout_s
        if run_s is not None and now_s - job.started_s >= run_s:
            self.cancel(job, DeadlineExceeded(f"the job ran longer than {run_s} s"))

    def _tell_positions(self, now_s: float) -> None:
        self._positions_are_old = False
        for position, key in enumerate(self._scheduler.order(now_s), 1):
            job = self.table.get(key)
            if job is not None and job.position != position:
                job.position = position
                self._watchers.job_moved(job)

    # --- states ---------------------------------------------------------------------------------

    def _said_again(self, job: Job, owner: Owner, mark: bytes) -> Job:
        if job.fingerprint != mark:
            raise IdConflict(
                f"the job id {job.request.job!r} was already used for another request",
                hint="make a new id for each request",
            )
        if job.is_final and self._results.get(job.key) is None:
            raise IdConflict(
                f"the job {job.request.job!r} has ended and its result was taken",
                hint="make a new id to run it again",
            )
        job.watchers.add(owner.client)
        return job

    def _start_next(self) -> None:
        while self._has_worker and self.running is None:
            now_s = self._clocks.monotonic_s()
            ticket = self._scheduler.start_next(now_s, self._is_runnable)
            if ticket is None:
                return
            self._positions_are_old = True
            job, model = self.table.get(ticket.job), self._models.get(ticket.model)
            if job is None or model is None:
                continue
            try:
                self._admission.check(job, model)
            except OffloadError as error:
                self._finish(job, "failed", error)
            else:
                self._start(job, model, now_s)

    def _is_runnable(self, name: str) -> bool:
        model = self._models.get(name)
        return model is not None and model.is_registered

    def _start(self, job: Job, model: HostedModel, now_s: float) -> None:
        self.running, job.started_s, job.position = job, now_s, None
        job.state = "loading"
        if model.loaded is not None:
            job.state, job.running_since_s = "running", now_s
        order = RunJob(
            job=job.key,
            model=job.request.model,
            arguments=job.request.arguments,
            seed=job.seed,
        )
        self._order(order, job.frames)
        job.frames = ()
        self._watchers.job_moved(job)

    def _complete(self, job: Job, news: JobEnded, frames: Sequence[bytes]) -> None:
        assert news.outcome is not None
        waited_s = job.timings(self._clocks.monotonic_s()).queued_s
        timings = msgspec.structs.replace(news.outcome.timings, queued_s=waited_s)
        outcome = msgspec.structs.replace(news.outcome, timings=timings)
        self._end(job, Finished(job=job.request.job, state="done", outcome=outcome), frames)
        self.totals.completed += 1

    def _fail(self, job: Job, news: JobEnded) -> None:
        error: OffloadError = WorkerCrashed("the worker said that the job ended, and not how")
        if news.error is not None:
            error = codec.to_exception(news.error)
        if error.code is ErrorCode.CANCELLED:
            error = job.stopping or error
        self._finish(job, "cancelled" if isinstance(error, Cancelled) else "failed", error)

    def _finish(self, job: Job, state: JobState, error: OffloadError) -> None:
        info = codec.error_info(error)
        self._end(job, Finished(job=job.request.job, state=state, error=info), ())
        if state == "cancelled":
            self.totals.cancelled += 1
        else:
            self.totals.failed += 1

    def _end(self, job: Job, finished: Finished, frames: Sequence[bytes]) -> None:
        now_s = self._clocks.monotonic_s()
        job.state, job.ended_s, job.position, job.frames = finished.state, now_s, None, ()
        if job.started_s is not None:
            self._typical_s += 0.2 * (now_s - job.started_s - self._typical_s)
        self._positions_are_old = True
        self._results.keep(job.key, encoded(finished, frames))
        for key in self.table.ended(job.key):
            self._forget(key)
        self._watchers.job_finished(job)
        if not self.is_used(job.request.model):
            self._models.unused(job.request.model)
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
