"""Moves jobs through their states: accepted, queued, on the worker, ended, forgotten.

Invariants:
- A job ends exactly once, whichever of worker, client, clock and shutdown comes first.
- A message of the worker about a job that is not on it (see `turns`) is out of date.
- What is checked is checked before a job is queued, or, while its model is not described yet,
  before it is started.
- A job may start before the journal has it, but nobody is told that it was accepted, or of its end,
  before that. If the journal cannot take it, it never was.
- Where a worker dies, its jobs go back to the queue (see `deaths`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from offload_protocol import codec
from offload_protocol.errors import (
    Cancelled,
    ErrorCode,
    IdConflict,
    OffloadError,
    StorageFailed,
    WorkerCrashed,
)
from offload_protocol.messages import Submit
from offloadd.channel.messages import DeviceReport, JobEnded, JobParked, JobProgressed, JobStays
from offloadd.control.jobs.admission import Admission
from offloadd.control.jobs.deadlines import Deadlines
from offloadd.control.jobs.endings import Endings, Watchers
from offloadd.control.jobs.estimates import steps_of
from offloadd.control.jobs.jobs import Fingerprint, Job, Owner, check_id, fingerprint, job_key
from offloadd.control.jobs.places import Places
from offloadd.control.jobs.starts import Starts, not_hosted
from offloadd.control.journal.frames import Frame
from offloadd.control.journal.journal import Journal
from offloadd.control.journal.reading import Accepted
from offloadd.control.models.hosted_model import HostedModel
from offloadd.control.models.models import ModelTable
from offloadd.control.scheduling.scheduler import Scheduler, Ticket
from offloadd.control.scheduling.turns import Order, Turns
from offloadd.control.workers.deaths import Death, blame, suspects

BRIEF_S, PATIENCE_S = 0.001, 0.01
"""A job that has begun and is expected to end within the first may wait for its end for the second,
so that one transaction accepts it and writes its end. What takes longer is accepted at once."""


class Dispatcher:
    """The jobs of one worker. `order` hands a message and frames to it."""

    def __init__(
        self,
        scheduler: Scheduler,
        models: ModelTable,
        endings: Endings,
        admission: Admission,
        journal: Journal,
        clock: Callable[[], float],
        watchers: Watchers,
        order: Order,
        max_parked: int,
        max_sweep: int,
    ) -> None:
        self.table = endings.table
        self.turns = Turns(scheduler, models, clock, max_parked, max_sweep, order, self._ticket)
        self._scheduler = scheduler
        self._models = models
        self._endings = endings
        self._admission = admission
        self._journal = journal
        self._clock = clock
        self._watchers = watchers
        self._places = Places(scheduler, endings.table, watchers, clock)
        self._starts = Starts(
            *(scheduler, self.table, self.turns, models, admission, self._places),
            *(clock, watchers, self._finish),
        )
        self._deadlines = Deadlines(scheduler, self.table, self.turns, self.cancel)
        self._refusal: OffloadError | None = None

    @property
    def running(self) -> Job | None:
        """The job that has the device."""
        return self.turns.running

    # --- what clients ask -----------------------------------------------------------------------

    def submit(self, owner: Owner, request: Submit, frames: Sequence[memoryview]) -> Job:
        """Queue a job, or find the one that was queued before by the same id and request.

        It is accepted when the journal has it: see `Job.when_written`. Raises `IdConflict`,
        `Busy`, what `refuse` was given, and what `Admission.admit` raises.
        """
        check_id(request.job)
        key, mark = job_key(owner.user, request.job), fingerprint(request, frames)
        known = self.table.get(key)
        if known is not None:
            return self._said_again(known, owner, mark)
        if self._refusal is not None:
            raise self._refusal
        job = self._admission.admit(owner, request, frames, mark)
        retry_after_s = max(self._places.estimates.typical_s, 1.0)
        ticket = self._ticket(job)
        self._scheduler.add(ticket, retry_after_s)
        job.number = self._journal.new_number()
        self.table.add(job)
        job.position = len(self._scheduler)
        self._places.changed()
        # First, since the worker can begin while the journal writes.
        self._starts.start_next()
        accepted = Accepted(
            *(job.number, owner.user, owner.client, owner.program, request),
            *(mark.digest, mark.size_bytes, job.seed, job.submitted_at),
        )
        is_brief = job.turn_since_s is not None and ticket.expected_s < BRIEF_S
        self._journal.accept(
            *(accepted, frames, lambda error: self._written(job, error)),
            patience_s=PATIENCE_S if is_brief else 0.0,
        )
        return job

    def restore(self, job: Job) -> None:
        """Queue a job that an earlier daemon accepted."""
        job.is_written = True
        self.table.add(job)
        if self._models.get(job.request.model) is None:
            self._finish(job, not_hosted(job))
        else:
            self._scheduler.restore(self._ticket(job))
            self._places.changed()

    def cancel(self, job: Job, reason: OffloadError | None = None) -> None:
        """End a job; nothing happens to one that has ended."""
        reason = reason or Cancelled(
            "the job was cancelled", hint="to draw it after all, submit it under a new id"
        )
        if self.turns.get(job.key) is job:
            if job.stopping is None:
                job.stopping = reason
                self._endings.will_end(job, reason)
            self.turns.stop(job)
        elif self._scheduler.remove(job.key):
            self._finish(job, reason)

    def client_gone(self, client: str) -> None:
        """A client will not come back: end the attached jobs that nobody else is attached to."""
        for job in self.table.live():
            if client in job.watchers:
                job.watchers.discard(client)
                if not job.watchers and not job.request.detached:
                    reason = Cancelled(
                        "the client that submitted the job has gone",
                        hint="submit with `detached` what is to go on without its client",
                    )
                    self.cancel(job, reason)

    def refuse(self, error: OffloadError | None) -> None:
        """From now on, answer every new job with this error, or, with None, accept them again."""
        self._refusal = error

    # --- what the worker says -------------------------------------------------------------------

    def worker_ready(self) -> None:
        """A worker takes orders."""
        self._starts.has_worker = True
        self._starts.start_next()

    def worker_lost(self, death: Death, loads: Collection[str] = ()) -> None:
        """The worker has died: what was on it is to run again, or fails as the cause of it.

        `loads` are the models that it was loading because clients had asked for that.
        """
        self._starts.has_worker = False
        lost = list(self.turns)
        going, loading = self.turns.going(), list(self.turns.loading.values())
        involved, is_only_one = suspects(going, loading, loads)
        for job in lost:
            self.turns.leave(job)
        for job in lost:
            error = blame(job, death, is_only_one) if job in involved else None
            if job in involved:
                self._journal.note_deaths(job.number, job.strikes, job.kills, is_alone=job.is_alone)
            if job.stopping is not None:
                self._finish(job, job.stopping)
            elif error is not None:
                self._finish(job, error)
            else:
                self._put_back(job)

    def _put_back(self, job: Job) -> None:
        self._endings.totals.requeued += 1
        job.put_back()
        self._scheduler.restore(self._ticket(job))
        self._places.changed()
        self._watchers.job_moved(job)

    def model_known(self, model: HostedModel) -> None:
        """A model was described, or cannot be: judge the jobs that wait for that."""
        if model.is_registered:
            self._starts.start_next()
        elif model.error is not None and model.described is None:
            error = codec.to_exception(model.error)
            for job in self.table.live():
                is_waiting = self.turns.get(job.key) is None
                if job.request.model == model.spec.name and is_waiting:
                    self._scheduler.remove(job.key)
                    self._finish(job, error)

    def device_measured(self, report: DeviceReport) -> None:
        """The worker has measured its device's memory."""
        self.turns.device = report

    def progressed(self, news: JobProgressed, frames: Sequence[Frame] = ()) -> None:
        """A job has come further."""
        job = self.turns.get(news.job)
        if job is None:
            return
        has_moved = (job.state, job.step, job.steps) != (news.state, news.step, news.steps)
        job.state, job.step, job.steps = news.state, news.step, news.steps
        if job.is_written and news.preview is not None:
            self._watchers.job_shown(job, news.preview, frames)
        elif job.is_written and has_moved:
            self._watchers.job_moved(job)
        self.turns.look()

    def parked(self, news: JobParked) -> None:
        """A job has given way, or is ready to begin."""
        job = self.turns.get(news.job)
        if job is None:
            return
        self._models.note_sharing(job.request.model, news.is_better_shared)
        self.turns.wait_again(job)
        self._places.changed()
        self._watchers.job_moved(job)
        self._starts.start_next()

    def stays(self, news: JobStays) -> None:
        """The running job could not give way."""
        self.turns.stays(news.job)

    def ended(self, news: JobEnded, frames: Sequence[Frame]) -> None:
        """A job on the worker has ended."""
        job = self.turns.get(news.job)
        if job is None:
            return
        if not job.has_shared:
            self._models.note_activations(job.request.model, news.activations_bytes)
        steps = steps_of(job.request.arguments)
        self._models.note_sharing(job.request.model, news.is_better_shared)
        # The worker's own time: ours holds what the loop did for others meanwhile.
        self._leave_worker(job, news.outcome.timings.running_s if news.outcome else None)
        if news.outcome is not None and not job.is_void:
            self._places.estimates.note(job.request.model, steps, job.charged_s)
        # First, since the worker can begin while this one's end is written and told.
        self._starts.start_next()
        if news.outcome is None:
            self._finish(job, _reason(job, news))
        elif not job.is_void:
            self._endings.complete(job, news.outcome, frames)

    def _leave_worker(self, job: Job, worked_s: float | None = None) -> None:
        self.turns.leave(job, worked_s)
        self._places.changed()
        if not self.turns.uses(job.request.model):
            self._models.free(job.request.model)

    # --- what time does -------------------------------------------------------------------------

    def tick(self) -> None:
        """Enforce deadlines, forget what is old, tell who has moved up in the queue."""
        now_s = self._clock()
        self._deadlines.enforce(now_s)
        self._endings.forget_old(now_s)
        self._starts.start_next()
        self._places.tell(self.turns.running)

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

    def _written(self, job: Job, error: StorageFailed | None) -> None:
        if error is not None:
            if self.turns.get(job.key) is None:
                self._scheduler.remove(job.key)
            self._endings.disown(job)
            if self.turns.get(job.key) is job:
                self.cancel(job, error)
        job.written(error)

    def _finish(self, job: Job, error: OffloadError) -> None:
        self._places.changed()
        if not job.is_void:
            self._endings.fail(job, error)

    def _ticket(self, job: Job) -> Ticket:
        request, wait_s = job.request, job.request.queue_timeout_s
        return Ticket(
            job=job.key,
            user=job.owner.user,
            program=job.owner.program,
            model=request.model,
            submitted_s=job.submitted_s,
            priority=request.priority,
            deadline_s=None if wait_s is None else job.submitted_s + wait_s,
            size_bytes=job.fingerprint.size_bytes,
            expected_s=self._places.expected_s(job),
            is_alone=job.is_alone,
            wears=job.wears,
        )


def _reason(job: Job, news: JobEnded) -> OffloadError:
    if news.error is None:
        return WorkerCrashed("the worker said that the job ended, and not how")
    error = codec.to_exception(news.error)
    # The worker knows that it was to stop, and we know why.
    return job.stopping or error if error.code is ErrorCode.CANCELLED else error
