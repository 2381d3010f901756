"""The jobs that are on the worker, and which of them has the device.

Invariants:
- At most one job has the device, or up to `max_sweep` on one model share it: then one of them
  counts as running, and the others go on beside it. Besides, at most `max_parked` (and for each
  that goes on beside, one more) have given way and wait for their next turn, and one waits for its
  model; what comes from the worker of others is out of date.
- The device's time is charged once: those who share it are charged equal parts.
- A job on a model that is not in memory never holds the device up: the worker loads beside the
  turns of others, and the job comes to its turn when that is done.
- Beside a job that is to be alone, nothing else computes or loads, nor beside the load for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from offloadd.channel.messages import (
    CancelJob,
    DeviceReport,
    GiveWay,
    ResumeJob,
    RunJob,
    ToWorker,
)
from offloadd.control.jobs.jobs import Job
from offloadd.control.models.models import ModelTable
from offloadd.control.scheduling.scheduler import Scheduler, Ticket
from offloadd.control.scheduling.sweep_room import jobs_that_fit

STAY_S = 1.0
"""How long a job that could not give way is not asked again."""

AHEAD_S = 0.05
"""How far ahead a turn is judged: the next look, which progress brings, may be as far away."""

Order = Callable[[ToWorker, Sequence[memoryview]], None]


class Turns:
    """Whose turn it is; `ticket` makes the ticket of a job that waits again."""

    def __init__(
        self,
        scheduler: Scheduler,
        models: ModelTable,
        clock: Callable[[], float],
        max_parked: int,
        max_sweep: int,
        order: Order,
        ticket: Callable[[Job], Ticket],
    ) -> None:
        self.running: Job | None = None
        self.beside: dict[str, Job] = {}
        self.parked: dict[str, Job] = {}
        self.loading: dict[str, Job] = {}
        self.device: DeviceReport | None = None
        """As it was measured last, while no job computed."""
        self._scheduler = scheduler
        self._models = models
        self._clock = clock
        self._max_parked = max_parked
        self._max_sweep = max_sweep
        self._order = order
        self._ticket = ticket
        self._charged_s: dict[str, float] = {}
        self._charged_at_s = 0.0
        self._asked_until_s: float | None = None
        """The running job was asked to give way, and will not be again before then."""

    def __iter__(self) -> Iterator[Job]:
        if self.running is not None:
            yield self.running
        yield from self.beside.values()
        yield from self.parked.values()
        yield from self.loading.values()

    def get(self, key: str) -> Job | None:
        """The job of that key, if it is on the worker."""
        if self.running is not None and self.running.key == key:
            return self.running
        return self.beside.get(key) or self.parked.get(key) or self.loading.get(key)

    def going(self) -> list[Job]:
        """The jobs that have the device."""
        return ([] if self.running is None else [self.running]) + list(self.beside.values())

    def uses(self, model: str) -> bool:
        """Some job on this model is on the worker."""
        return any(job.request.model == model for job in self)

    def may_take_turn(self, ticket: Ticket) -> bool:
        """Whether a waiting job may have the device that is free, be it to load with it idle."""
        most_parked = self._most_parked
        return self._may(ticket, most_parked) or self._may_load_alone(ticket, most_parked)

    @property
    def is_shareable(self) -> bool:
        """Whether jobs may come beside the one that runs."""
        job = self.running
        if job is None or job.wears is None or job.stopping is not None:
            return False
        model = self._models.get(job.request.model)
        if self._is_asked or model is None or not model.shares:
            return False
        fit = jobs_that_fit(self.device, model.activations_bytes)
        most = self._max_sweep if fit is None else min(fit, self._max_sweep)
        return 1 + len(self.beside) < most

    @property
    def _is_asked(self) -> bool:
        return self._asked_until_s is not None and self._clock() < self._asked_until_s

    def may_share(self, ticket: Ticket) -> bool:
        """Whether a waiting job may go on beside the one that runs."""
        job = self.running
        if job is None or ticket.model != job.request.model:
            return False
        is_fit = ticket.wears is not None and ticket.wears == job.wears
        return is_fit and self._may(ticket, self._most_parked)

    def may_load_for_waiting(self) -> bool:
        """Whether there may be a job for which `may_load` is true; quick where all is loaded."""
        if self.running is not None and self.running.is_alone:
            return False
        return any(self._may_load(model) for model in self._scheduler.models)

    def may_load(self, ticket: Ticket) -> bool:
        """Whether a waiting job may go to the worker to have its model loaded beside others."""
        if ticket.job in self.parked or (ticket.is_alone and self.running is not None):
            return False
        return self._may_load(ticket.model)

    def needs_load(self, job: Job) -> bool:
        """A job's model is to be loaded before it can have the device."""
        model = self._models.get(job.request.model)
        return job.key not in self.parked and model is not None and model.loaded is None

    def _may_load_alone(self, ticket: Ticket, most_parked: int) -> bool:
        is_new = ticket.is_alone and ticket.job not in self.parked
        return is_new and len(self.parked) <= most_parked and self._may_load(ticket.model)

    def _may_load(self, name: str) -> bool:
        model = self._models.get(name)
        return (
            model is not None
            and model.loaded is None
            and model.is_registered
            and not model.is_going
            and not self.loading
            and len(self.parked) <= self._most_parked
        )

    def begin(self, job: Job, now_s: float) -> None:
        """The scheduler has given the device to a job: it starts, or goes on where it was."""
        self._charge(now_s)
        self.running, self._asked_until_s = job, None
        self._go_on(job, now_s)

    def begin_beside(self, job: Job, now_s: float) -> None:
        """A job shares the device with the one that runs."""
        self._charge(now_s)
        self.beside[job.key] = job
        for one in self.going():
            one.has_shared = True
        self._go_on(job, now_s)

    def _go_on(self, job: Job, now_s: float) -> None:
        job.state, job.position = "running", None
        job.turn_since_s = now_s
        if job.running_since_s is None:
            job.running_since_s = now_s
            # While it was loading, components were counted.
            job.step = job.steps = 0
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
        if self._is_asked:
            return
        used_s = now_s - job.turn_since_s + AHEAD_S
        if self._scheduler.is_owed(now_s, used_s, self._may_take_over):
            self._asked_until_s = float("inf")
            for one in self.going():
                self._order(GiveWay(job=one.key), ())

    def stays(self, key: str) -> None:
        """The running job could not give way."""
        if (self.running is not None and self.running.key == key) or key in self.beside:
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

    def leave(self, job: Job, worked_s: float | None = None) -> None:
        """A job is not on the worker any more, which has worked on it so long in all its turns."""
        used_s = self._end_turn(job, worked_s)
        self.parked.pop(job.key, None)
        self.loading.pop(job.key, None)
        if not self._scheduler.remove(job.key):
            self._scheduler.stopped(job.key, used_s)

    def _end_turn(self, job: Job, worked_s: float | None = None) -> float:
        """Take the device from a job, if it has it; gives how long it had it this time."""
        is_beside = self.beside.get(job.key) is job
        if job.turn_since_s is None or not (job is self.running or is_beside):
            return 0.0
        now_s = self._clock()
        self._charge(now_s)
        self.beside.pop(job.key, None)
        if job is self.running:
            self.running = self.beside.pop(next(iter(self.beside)), None) if self.beside else None
        if self.running is None:
            self._asked_until_s = None
        job.used_s, job.turn_since_s = job.used_s + now_s - job.turn_since_s, None
        charged_s = self._charged_s.pop(job.key, 0.0)
        if worked_s is not None:
            charged_s = min(charged_s, max(worked_s - job.charged_s, 0.0))
        job.charged_s += charged_s
        return charged_s

    def _charge(self, now_s: float) -> None:
        """Charge those who have the device with the time since this was done last."""
        elapsed_s, self._charged_at_s = now_s - self._charged_at_s, now_s
        going = self.going()
        for job in going:
            share_s = elapsed_s / len(going)
            self._charged_s[job.key] = self._charged_s.get(job.key, 0.0) + share_s

    def _may_take_over(self, ticket: Ticket) -> bool:
        # The running job will be parked beside those that are.
        most_parked = self._most_parked - 1
        return self._may(ticket, most_parked) or self._may_load_alone(ticket, most_parked)

    @property
    def _most_parked(self) -> int:
        """Those who share the device give way together."""
        return self._max_parked + self._max_sweep - 1 if self._max_parked else 0

    def _may(self, ticket: Ticket, most_parked: int) -> bool:
        if any(job.is_alone for job in self.loading.values()):
            return False
        if ticket.is_alone and (self.loading or self._models.under_load):
            return False
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
        is_alone=job.is_alone,
        preview_every_s=job.request.preview_every_s,
        adapters=job.request.adapters,
        owner=job.owner.user,
    )
