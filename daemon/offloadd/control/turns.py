"""The jobs that are on the worker, and which of them has the device.

Invariants:
- At most one job has the device. Besides, at most `max_parked` have given way and wait for their
  next turn, and one waits for its model; what comes from the worker of others is out of date.
- A job on a model that is not in memory never holds the device up: the worker loads beside the
  turns of others, and the job comes to its turn when that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from offloadd.channel.messages import CancelJob, GiveWay, ResumeJob, RunJob, ToWorker
from offloadd.control.jobs import Job
from offloadd.control.models import ModelTable
from offloadd.control.scheduler import Scheduler, Ticket

STAY_S = 1.0
"""How long a job that could not give way is not asked again."""

Order = Callable[[ToWorker, Sequence[memoryview]], None]


class Turns:
    """Whose turn it is; `ticket` makes the ticket of a job that waits again."""

    def __init__(
        self,
        scheduler: Scheduler,
        models: ModelTable,
        clock: Callable[[], float],
        max_parked: int,
        order: Order,
        ticket: Callable[[Job], Ticket],
    ) -> None:
        self.running: Job | None = None
        self.parked: dict[str, Job] = {}
        self.loading: dict[str, Job] = {}
        self._scheduler = scheduler
        self._models = models
        self._clock = clock
        self._max_parked = max_parked
        self._order = order
        self._ticket = ticket
        self._asked_until_s: float | None = None
        """The running job was asked to give way, and will not be again before then."""

    def __iter__(self) -> Iterator[Job]:
        if self.running is not None:
            yield self.running
        yield from self.parked.values()
        yield from self.loading.values()

    def get(self, key: str) -> Job | None:
        """The job of that key, if it is on the worker."""
        if self.running is not None and self.running.key == key:
            return self.running
        return self.parked.get(key) or self.loading.get(key)

    def uses(self, model: str) -> bool:
        """Some job on this model is on the worker."""
        return any(job.request.model == model for job in self)

    def may_take_turn(self, ticket: Ticket) -> bool:
        """Whether a waiting job may have the device that is free."""
        return self._may(ticket, self._max_parked)

    def may_load_for_waiting(self) -> bool:
        """Whether there may be a job for which `may_load` is true; quick where all is loaded."""
        return any(self._may_load(model) for model in self._scheduler.models)

    def may_load(self, ticket: Ticket) -> bool:
        """Whether a waiting job may go to the worker to have its model loaded."""
        return ticket.job not in self.parked and self._may_load(ticket.model)

    def _may_load(self, name: str) -> bool:
        model = self._models.get(name)
        return (
            model is not None
            and model.loaded is None
            and model.is_registered
            and not model.is_going
            and not self.loading
            and len(self.parked) <= self._max_parked
        )

    def begin(self, job: Job, now_s: float) -> None:
        """The scheduler has given the device to a job: it starts, or goes on where it was."""
        self.running, self._asked_until_s = job, None
        job.state, job.position = "running", None
        job.turn_since_s = now_s
        if job.running_since_s is None:
            job.running_since_s = now_s
        if self.parked.pop(job.key, None) is not None:
            self._order(ResumeJob(job=job.key), ())
        else:
            job.started_s = now_s
            self._order(_run(job), job.frames)

    def begin_loading(self, job: Job, now_s: float) -> None:
        """The scheduler has chosen a job whose model is not in memory."""
        self.loading[job.key] = job
        job.state, job.position, job.started_s = "loading", None, now_s
        self._order(_run(job, awaits_turn=True), job.frames)

    def look(self) -> None:
        """Let the running job give way if the device is owed to another's."""
        job, now_s = self.running, self._clock()
        if job is None or job.turn_since_s is None or job.stopping is not None:
            return
        if self._asked_until_s is not None and now_s < self._asked_until_s:
            return
        if self._scheduler.is_owed(now_s, now_s - job.turn_since_s, self._may_take_over):
            self._asked_until_s = float("inf")
            self._order(GiveWay(job=job.key), ())

    def stays(self, key: str) -> None:
        """The running job could not give way."""
        if self.running is not None and self.running.key == key:
            self._asked_until_s = self._clock() + STAY_S

    def wait_again(self, job: Job) -> None:
        """A job has given way, or its model is loaded: it waits for its next turn."""
        used_s = self._end_turn(job)
        if self.loading.pop(job.key, None) is None:
            job.state = "parked"
        self.parked[job.key] = job
        if job.stopping is None:
            self._scheduler.put_back(self._ticket(job), used_s)
        else:
            # Told to stop, it only has to say that it has.
            self._scheduler.stopped(job.key, used_s)

    def stop(self, job: Job) -> None:
        """Let the worker end a job that is on it."""
        self._scheduler.remove(job.key)
        self._order(CancelJob(job=job.key), ())

    def leave(self, job: Job) -> None:
        """A job is not on the worker any more."""
        used_s = self._end_turn(job)
        self.parked.pop(job.key, None)
        self.loading.pop(job.key, None)
        if not self._scheduler.remove(job.key):
            self._scheduler.stopped(job.key, used_s)

    def _end_turn(self, job: Job) -> float:
        """Take the device from a job, if it has it; gives how long it had it this time."""
        if job is not self.running or job.turn_since_s is None:
            return 0.0
        used_s = self._clock() - job.turn_since_s
        self.running, self._asked_until_s = None, None
        job.used_s, job.turn_since_s = job.used_s + used_s, None
        return used_s

    def _may_take_over(self, ticket: Ticket) -> bool:
        # The running job will be parked beside those that are.
        return self._may(ticket, self._max_parked - 1)

    def _may(self, ticket: Ticket, most_parked: int) -> bool:
        if ticket.job in self.parked:
            return self._max_parked > 0 or self.running is None
        if len(self.parked) > most_parked:
            return False
        # Whoever had the model loaded is about to say that it is ready, and goes first.
        if any(job.request.model == ticket.model for job in self.loading.values()):
            return False
        model = self._models.get(ticket.model)
        return model is not None and model.is_ready


def _run(job: Job, awaits_turn: bool = False) -> RunJob:
    return RunJob(
        job=job.key,
        model=job.request.model,
        arguments=job.request.arguments,
        seed=job.seed,
        awaits_turn=awaits_turn,
    )
