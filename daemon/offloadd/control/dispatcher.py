"""Moves jobs through their states: accepted, queued, on the worker, ended, forgotten.

Invariants:
- A job ends exactly once, whichever of worker, client, clock and shutdown comes first.
- At most one job is on the worker. A message of the worker about any other job is out of date.
- What is checked is checked before a job is queued, or, while its model is not described yet,
  before it is started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload_protocol import codec
from offload_protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorCode,
    IdConflict,
    OffloadError,
    WorkerCrashed,
)
from offload_protocol.messages import Submit
from offloadd.channel.messages import CancelJob, JobEnded, JobProgressed, RunJob, ToWorker
from offloadd.control.admission import Admission
from offloadd.control.endings import Endings, Watchers
from offloadd.control.jobs import Fingerprint, Job, Owner, check_id, fingerprint, job_key
from offloadd.control.models import HostedModel, ModelTable
from offloadd.control.scheduler import Scheduler, Ticket


class Dispatcher:
    """The jobs of one worker. `order` hands a message and frames to it."""

    def __init__(
        self,
        scheduler: Scheduler,
        models: ModelTable,
        endings: Endings,
        admission: Admission,
        clock: Callable[[], float],
        watchers: Watchers,
        order: Callable[[ToWorker, Sequence[memoryview]], None],
    ) -> None:
        self.table = endings.table
        self.running: Job | None = None
        self._scheduler = scheduler
        self._models = models
        self._endings = endings
        self._admission = admission
        self._clock = clock
        self._watchers = watchers
        self._order = order
        self._has_worker = False
        self._refusal: OffloadError | None = None
        self._positions_are_old = False

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
            size_bytes=mark.size_bytes,
        )
        self._scheduler.add(ticket, retry_after_s=self._endings.retry_after_s)
        self.table.add(job)
        job.position = len(self._scheduler)
        self._positions_are_old = True
        self._start_next()
        return job

    def cancel(self, job: Job, reason: OffloadError | None = None) -> None:
        """End a job; nothing happens to one that has ended."""
        reason = reason or Cancelled("the job was cancelled")
        if self._scheduler.remove(job.key):
            self._finish(job, reason)
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
            self._finish(job, error)

    def model_known(self, model: HostedModel) -> None:
        """A model was described, or cannot be: judge the jobs that wait for that."""
        if model.is_registered:
            self._start_next()
        elif model.error is not None and model.described is None:
            error = codec.to_exception(model.error)
            for job in self.table.live():
                if job.request.model == model.spec.name and self._scheduler.remove(job.key):
                    self._finish(job, error)

    def progressed(self, news: JobProgressed) -> None:
        """The running job has come further."""
        job = self.running
        if job is None or job.key != news.job:
            return
        job.state, job.step, job.steps = news.state, news.step, news.steps
        if news.state == "running" and job.running_since_s is None:
            job.running_since_s = self._clock()
        self._watchers.job_moved(job)

    def ended(self, news: JobEnded, frames: Sequence[bytes]) -> None:
        """The running job has ended."""
        job = self.running
        if job is None or job.key != news.job:
            return
        self.running = None
        self._positions_are_old = True
        if news.outcome is not None:
            self._endings.complete(job, news.outcome, frames)
        else:
            self._endings.fail(job, _reason(job, news))
        self._start_next()

    # --- what time does -------------------------------------------------------------------------

    def tick(self) -> None:
        """Enforce deadlines, forget what is old, tell who has moved up in the queue."""
        now_s = self._clock()
        for key in self._scheduler.expired(now_s):
            job = self.table.get(key)
            if job is not None:
                waited_s = job.request.queue_timeout_s
                self.cancel(job, DeadlineExceeded(f"the job waited longer than {waited_s} s"))
        self._stop_overdue(now_s)
        self._endings.forget_old(now_s)
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

    def _said_again(self, job: Job, owner: Owner, mark: Fingerprint) -> Job:
        if job.fingerprint != mark:
            raise IdConflict(
                f"the job id {job.request.job!r} was already used for another request",
                hint="make a new id for each request",
            )
        if job.is_final and not self._endings.has_result(job):
            raise IdConflict(
                f"the job {job.request.job!r} has ended and its result was taken",
                hint="make a new id to run it again",
            )
        job.watchers.add(owner.client)
        return job

    def _start_next(self) -> None:
        while self._has_worker and self.running is None:
            now_s = self._clock()
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
                self._finish(job, error)
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

    def _finish(self, job: Job, error: OffloadError) -> None:
        self._positions_are_old = True
        self._endings.fail(job, error)


def _reason(job: Job, news: JobEnded) -> OffloadError:
    if news.error is None:
        return WorkerCrashed("the worker said that the job ended, and not how")
    error = codec.to_exception(news.error)
    # The worker knows that it was to stop, and we know why.
    return job.stopping or error if error.code is ErrorCode.CANCELLED else error
