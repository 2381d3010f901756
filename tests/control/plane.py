"""The control plane without sockets, processes and time: its parts on a fake clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload_protocol.limits import DEFAULT_LIMITS
from offload_protocol.messages import Submit
from offload_protocol.records import ModelInfo, Outcome
from offloadd.channel.messages import (
    CancelJob,
    GiveWay,
    JobEnded,
    JobParked,
    LoadModel,
    ModelDescribed,
    ModelLoaded,
    ModelUnloaded,
    Register,
    ResumeJob,
    RunJob,
    ToWorker,
    UnloadModel,
)
from offloadd.channel.specs import ModelSpec
from offloadd.control.clocks import Clocks
from offloadd.control.jobs.admission import Admission
from offloadd.control.jobs.arguments import Bounds as ArgumentBounds
from offloadd.control.jobs.dispatcher import Dispatcher
from offloadd.control.jobs.endings import Endings
from offloadd.control.jobs.jobs import Job, Owner
from offloadd.control.journal.reading import Accepted
from offloadd.control.models.keep_alive import KeepAlive
from offloadd.control.models.models import ModelTable
from offloadd.control.scheduling.scheduler import Bounds, Scheduler

OWNER = Owner("1", "1:s", "p")


class InstantJournal:
    """Says at once that something is written; tests of the journal itself are elsewhere."""

    def __init__(self) -> None:
        self.numbers = 0

    def new_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def accept(
        self, job: Accepted, frames: Sequence[Any], told: Any, patience_s: float = 0.0
    ) -> None:
        told(None)

    def note_deaths(self, number: int, strikes: int, kills: int, *, is_alone: bool) -> None:
        pass

    def end(self, *row: Any) -> None:
        row[-1](None)

    def forget(self, number: int, user: str, job: str) -> None:
        pass


class Quiet:
    """Nobody watches."""

    def job_moved(self, job: Job) -> None:
        pass

    def job_shown(self, job: Job, preview: Any, frames: Any) -> None:
        pass

    def job_finished(self, job: Job) -> None:
        pass


class Plane:
    """The control plane's pure parts on a fake clock, with a worker that answers when it is let."""

    def __init__(
        self, spec: ModelSpec, default_s: float = 100.0, max_parked: int = 4, max_sweep: int = 1
    ) -> None:
        self.now_s = 0.0
        self.orders: list[ToWorker] = []
        self.in_memory = False
        self.running: str | None = None
        clocks = Clocks(lambda: self.now_s, lambda: 1e9 + self.now_s, lambda: 1)
        self.clocks = clocks
        journal: Any = InstantJournal()
        self.models = ModelTable([spec], self.orders.append, clocks.monotonic_s)
        self.endings = Endings(
            *(1 << 20, 3600.0, clocks, journal, Quiet()),
            on_ended=lambda job: self.keep_alive.job_ended(job),
        )
        self.keep_alive = KeepAlive(self.models, self.endings.table.uses, default_s, clocks)
        bounds = ArgumentBounds(10, 10**6, 1, 1)
        self.dispatcher = Dispatcher(
            Scheduler(Bounds(100, 100, 10**6, 30.0), lambda _: 0.0),
            self.models,
            self.endings,
            Admission(self.models, DEFAULT_LIMITS, bounds, clocks),
            journal,
            clocks.monotonic_s,
            Quiet(),
            lambda order, frames: self.orders.append(order),
            max_parked,
            max_sweep,
        )
        self.models.worker_ready()
        self.work()
        self.dispatcher.worker_ready()

    @property
    def model(self) -> ModelInfo:
        (model,) = self.models
        return model.info()

    def submit(self, job: str, owner: Owner = OWNER, **fields: Any) -> Job:
        return self.dispatcher.submit(owner, Submit(rid=1, job=job, model="m", **fields), ())

    def tick(self) -> None:
        self.dispatcher.tick()
        self.keep_alive.tick()

    def work(self, orders: int = 1000) -> None:
        """Let the worker do what it was told, in its order."""
        while self.orders and orders:
            orders -= 1
            match self.orders.pop(0):
                case Register():
                    self.models.described(
                        ModelDescribed(
                            name="m",
                            pipeline="P",
                            dtype="",
                            offload="",
                            components=[],
                            parameters=[],
                        )
                    )
                case LoadModel():
                    self.load()
                case UnloadModel():
                    assert self.running is None, "in the middle of a turn"
                    self.in_memory = False
                    self.models.unloaded(ModelUnloaded(name="m"))
                    self.dispatcher.model_known(next(iter(self.models)))
                case RunJob(job=job, awaits_turn=awaits_turn):
                    if not self.in_memory:
                        self.load()
                    if awaits_turn:
                        self.dispatcher.parked(JobParked(job=job))
                    else:
                        self.running = job
                case ResumeJob(job=job):
                    self.running = job
                case GiveWay(job=job) if job == self.running:
                    # Said of a job that has ended meanwhile, it does nothing.
                    self.running = None
                    self.dispatcher.parked(JobParked(job=job))
                case CancelJob():
                    pass

    def load(self) -> None:
        self.in_memory = True
        self.models.loaded(ModelLoaded(name="m", offload="", components=[], loading_s=0.0))
        self.keep_alive.model_loaded("m")
        self.dispatcher.model_known(next(iter(self.models)))

    def end(self) -> None:
        """End the running job."""
        assert self.running is not None
        job, self.running = self.running, None
        self.dispatcher.ended(JobEnded(job=job, outcome=Outcome(outputs={}, seeds=[1])), ())

    def draw(self, job: str, **fields: Any) -> None:
        """Run a job from its submission to its end."""
        self.submit(job, **fields)
        self.work()
        self.end()
        self.work()
