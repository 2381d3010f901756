"""The threads of a worker: some for orders about models, and as many as jobs are on it at once.

Whoever takes a job runs it, so that in the usual case, one job after the other, no job passes from
thread to thread; a brief one does not even come to its thread through another (see `listening`). A
thread is added when the last idle one is busy with a job, and kept.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch

from offloadd.channel.framing import ChannelClosed, WorkerEnd
from offloadd.channel.messages import (
    FromWorker,
    LoadModel,
    ModelFailed,
    ModelUnloaded,
    Register,
    UnloadModel,
)
from offloadd.hosting.device_host import DeviceHost, accelerator_for
from offloadd.store.pack_cache import cache_directory
from offloadd.store.reader import DiskReader
from offloadd.worker.attempts import Attempts
from offloadd.worker.device import Device, report
from offloadd.worker.exits import BROKEN, CHANNEL_CLOSED
from offloadd.worker.job_runner import JobRunner, loaded_message
from offloadd.worker.journal_log import quieten_libraries
from offloadd.worker.listening import Ear
from offloadd.worker.models import Models
from offloadd.worker.orders import ModelWork, Order
from offloadd.worker.receiver import Desk, end_process, next_job
from offloadd.worker.room_keeper import RoomKeeper

REPORT_PAUSE_S, REPORT_AGE_S = 0.05, 1.0
"""After a short job the memory is measured when no other follows at once, or the last report is as
old as this: measuring takes as long as the turn of a small job."""

MOST_ON_MODELS = 4
"""So many models are checked, loaded or unloaded by order at once; jobs load theirs themselves."""

_log = logging.getLogger(__name__)


class Crew:
    """Works until the process ends."""

    def __init__(self, channel: WorkerEnd, desk: Desk, device: Device, reader: DiskReader) -> None:
        self._channel = channel
        self._desk = desk
        self._device = device
        self._baton = desk.turns.baton
        accelerator = accelerator_for(device.torch_device)
        self._host = DeviceHost(
            *(accelerator, cache_directory(), desk.arena, reader),
            *(self._baton.released, desk.embeddings),
        )
        self._models = Models(device, self._host, self._baton)
        RoomKeeper(desk.arena, self._models)
        self._attempts = Attempts(device, self._host, self._baton)
        self._runner = JobRunner(channel, device, self._models, desk.turns, self._attempts)
        self._reported_s = -REPORT_AGE_S
        self._report_is_wanted = threading.Event()
        self._numbers = itertools.count(1)
        self._adding = threading.Lock()
        self._on_models = 1

    def run(self) -> None:
        """Work on orders about models in this thread and some more, and on jobs in others."""
        quieten_libraries()
        # The libraries stay; to look through them again and again would hold up some jobs.
        gc.collect()
        gc.freeze()
        threading.excepthook = _end_broken
        self._report()
        threading.Thread(target=self._report_when_wanted, name="reports", daemon=True).start()
        self._add_member()
        self._work_on_models()

    def _work_on_models(self) -> None:
        orders = self._desk.models
        try:
            while True:
                work = orders.take()
                if not orders.somebody_waits:
                    self._add_to_models()
                self._work_on(work)
                orders.done(work)
                self._report_is_wanted.set()
        except ChannelClosed as reason:
            _end_closed(reason)

    def _add_to_models(self) -> None:
        with self._adding:
            if self._on_models >= MOST_ON_MODELS:
                return
            self._on_models += 1
            name = f"models-{self._on_models}"
        threading.Thread(target=self._work_on_models, name=name, daemon=True).start()

    def _add_member(self) -> None:
        name = f"jobs-{next(self._numbers)}"
        threading.Thread(target=self._run_jobs, name=name, daemon=True).start()

    def _run_jobs(self) -> None:
        if not self._device.is_cpu:
            # Each thread has a current device of its own.
            torch.get_device_module(self._device.torch_device).set_device(self._device.torch_device)
        ear = Ear(self._desk.listening, self._see_to_successor)
        owes_report = False
        try:
            while True:
                order = self._next_job(ear, REPORT_PAUSE_S if owes_report else None)
                if order is not None:
                    self._runner.run(order.work, order.frames, order.turn, ear.let_go)
                is_old = time.monotonic() - self._reported_s >= REPORT_AGE_S
                owes_report = order is not None and not is_old
                if not owes_report and self._baton.try_take():
                    # Otherwise whoever has the device reports when it is done.
                    try:
                        self._report_held()
                    finally:
                        self._baton.give_back()
        except ChannelClosed as reason:
            _end_closed(reason)

    def _next_job(self, ear: Ear, timeout_s: float | None) -> Order | None:
        """The next job, from another thread's hand or the channel; None where none came in time."""
        listens = ear.listens()
        if not listens:
            order = self._desk.jobs.take_within(timeout_s)
        elif timeout_s is not None and not self._channel.is_readable(timeout_s):
            order = None
        else:
            order = next_job(self._channel, self._desk)
        if order is not None:
            ear.begin(is_handed=not listens)
        return order

    def _see_to_successor(self) -> None:
        if not self._desk.jobs.somebody_waits:
            self._add_member()

    def _work_on(self, work: ModelWork) -> None:
        match work:
            case Register(spec=spec):
                self._answer(spec.name, lambda: self._models.register(spec).message())
            case LoadModel(name=name):
                self._answer(name, lambda: self._load(name))
            case UnloadModel(name=name, forget=forget):
                self._answer(name, lambda: self._unload(name, forget))

    def _answer(self, name: str, work: Callable[[], FromWorker]) -> None:
        done = self._attempts.make(work, has_baton=False, loads=True)
        answer = done.result
        if done.error is not None:
            _log.warning("model=%s failed: %s", name, done.error.message)
            answer = ModelFailed(name=name, error=done.error)
        assert answer is not None
        self._channel.send(answer)

    def _load(self, name: str) -> FromWorker:
        start_s = time.monotonic()
        model, _ = self._models.use(name, _unwatched)
        try:
            return loaded_message(name, model, time.monotonic() - start_s)
        finally:
            self._models.leave(name)

    def _unload(self, name: str, forget: bool) -> ModelUnloaded:
        self._models.unload(name)
        if forget:
            self._models.forget(name)
        return ModelUnloaded(name=name)

    def _report_when_wanted(self) -> None:
        # In a thread of its own: a forward can hold the device for minutes, and a report waits for
        # its border, while the next model could be looked at.
        try:
            while True:
                self._report_is_wanted.wait()
                self._report_is_wanted.clear()
                self._report()
        except ChannelClosed as reason:
            _end_closed(reason)

    def _report(self) -> None:
        with self._baton.held():
            self._report_held()

    def _report_held(self) -> None:
        self._reported_s = time.monotonic()
        placed = self._models.placed()
        self._channel.send(
            report(
                self._device,
                resident_bytes=self._models.resident_bytes,
                ring_bytes=self._host.engine.stats().ring_bytes,
                host_bytes=sum(one.host_bytes for one in placed.values()),
                measured=self._host.engine.measured_speed(),
                parked_bytes=self._host.parked_bytes,
                placed=placed,
                embeddings=self._host.embeddings.figures(),
            )
        )


def _unwatched(done: int, total: int) -> None:
    """Loading that no job waits for reports no progress."""


def _end_closed(reason: ChannelClosed) -> None:
    _log.info("channel closed, ending: %s", reason)
    end_process(CHANNEL_CLOSED)


def _end_broken(arguments: threading.ExceptHookArgs) -> None:
    # A thread that ends takes its job, and maybe the device, with it: nobody could go on.
    kind, error = arguments.exc_type, arguments.exc_value
    trace: TracebackType | None = arguments.exc_traceback
    told = (kind, error or kind(), trace)
    _log.critical("a thread ended by a fault of its own", exc_info=told)
    end_process(BROKEN)
