"""Starts jobs: on the device when it is free, or on the way to it while their model is loaded.

What is to be checked and could not be when a job was submitted, is checked here.
"""

from __future__ import annotations

from collections.abc import Callable

from offload_protocol.errors import OffloadError, UnknownModel
from offloadd.control.jobs.admission import Admission
from offloadd.control.jobs.endings import Watchers
from offloadd.control.jobs.jobs import Job, JobTable
from offloadd.control.jobs.places import Places
from offloadd.control.models.models import ModelTable
from offloadd.control.scheduling.scheduler import Scheduler, Ticket
from offloadd.control.scheduling.turns import Turns


class Starts:
    """Fills the worker of one device; `finish` ends a job that turns out not to be fit."""

    def __init__(
        self,
        scheduler: Scheduler,
        table: JobTable,
        turns: Turns,
        models: ModelTable,
        admission: Admission,
        places: Places,
        clock: Callable[[], float],
        watchers: Watchers,
        finish: Callable[[Job, OffloadError], None],
    ) -> None:
        self.has_worker = False
        self._scheduler = scheduler
        self._table = table
        self._turns = turns
        self._models = models
        self._admission = admission
        self._places = places
        self._clock = clock
        self._watchers = watchers
        self._finish = finish

    def start_next(self) -> None:
        """Start what can start now, and let the running job give way if it is to."""
        if not self.has_worker or not len(self._scheduler):
            return
        while self._turns.running is None:
            job = self._next(self._turns.may_take_turn)
            if job is None:
                break
            if self._turns.needs_load(job):
                self._begin_loading(job)
            elif self._is_fit(job):
                self._turns.begin(job, self._clock())
                self._tell(job)
        if not len(self._scheduler):
            # As in the usual case: nobody waits who could share, load, or be owed the device.
            return
        while self._turns.is_shareable:
            job = self._next(self._turns.may_share)
            if job is None:
                break
            if self._is_fit(job):
                self._turns.begin_beside(job, self._clock())
                self._tell(job)
        while self._turns.may_load_for_waiting():
            job = self._next(self._turns.may_load)
            if job is None:
                break
            self._begin_loading(job)
        self._turns.look()

    def _begin_loading(self, job: Job) -> None:
        self._scheduler.set_aside(job.key)
        if self._is_fit(job):
            self._turns.begin_loading(job, self._clock())
            self._tell(job)

    def _next(self, may: Callable[[Ticket], bool]) -> Job | None:
        ticket = self._scheduler.start_next(self._clock(), may)
        if ticket is None:
            return None
        self._places.changed()
        job = self._table.get(ticket.job)
        assert job is not None, "what waits is in the table"
        return job

    def _tell(self, job: Job) -> None:
        # Until the job is written, the answer that it is accepted says as much.
        if job.is_written:
            self._watchers.job_moved(job)

    def _is_fit(self, job: Job) -> bool:
        """Whether a job may start; otherwise it has ended here."""
        if self._turns.get(job.key) is job:
            return True
        model = self._models.get(job.request.model)
        try:
            if model is None:
                raise not_hosted(job)
            self._models.check(model)
            self._admission.check(job, model)
        except OffloadError as error:
            self._scheduler.stopped(job.key, 0.0)
            self._finish(job, error)
            return False
        return True


def not_hosted(job: Job) -> UnknownModel:
    """Why a job ends whose model has gone."""
    return UnknownModel(
        f"the model {job.request.model!r} is no longer hosted here",
        hint="host it again, and submit the job under a new id",
    )
