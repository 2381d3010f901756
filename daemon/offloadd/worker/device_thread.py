"""Works on one order after another on the device, and answers each exactly once.

An order that fails is answered with its error, and the next one finds everything in order; only a
fault that poisons the device ends the process, with its own exit code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from offload_protocol import values
from offload_protocol.codec import error_info
from offload_protocol.errors import InternalError
from offload_protocol.messages import ErrorInfo, Outcome, Timings
from offloadd.channel.framing import ChannelClosed, Frame, WorkerEnd
from offloadd.channel.messages import (
    FromWorker,
    JobEnded,
    LoadModel,
    ModelFailed,
    ModelLoaded,
    ModelUnloaded,
    Register,
    RunJob,
    UnloadModel,
)
from offloadd.hosting.arguments import prepare_call
from offloadd.hosting.device_host import DeviceHost, accelerator_for
from offloadd.hosting.hosted import give_memory_back
from offloadd.hosting.loading import OnComponent
from offloadd.hosting.packs import cache_directory
from offloadd.store.arena.client import ArenaClient
from offloadd.store.reader import DiskReader
from offloadd.worker.device import Device, measure, report
from offloadd.worker.exits import CHANNEL_CLOSED, DEVICE_FAULT
from offloadd.worker.failures import is_device_fault, is_out_of_memory, sentence, to_offload_error
from offloadd.worker.journal_log import quieten_libraries
from offloadd.worker.models import Models
from offloadd.worker.orders import Order, Orders
from offloadd.worker.peak import PeakMeter
from offloadd.worker.progress import JobProgress
from offloadd.worker.receiver import end_process

REPORT_PAUSE_S, REPORT_AGE_S = 0.05, 1.0
"""After a short job the memory is measured when no other follows at once, or the last report is as
old as this: measuring takes as long as the turn of a small job."""

_log = logging.getLogger(__name__)


class DeviceThread:
    """The thread that owns the device: it alone loads, runs and unloads models."""

    def __init__(
        self,
        channel: WorkerEnd,
        orders: Orders,
        device: Device,
        arena: ArenaClient,
        reader: DiskReader,
    ) -> None:
        self._channel = channel
        self._orders = orders
        self._device = device
        accelerator = accelerator_for(device.torch_device)
        self._host = DeviceHost(accelerator, cache_directory(), arena, reader)
        self._models = Models(device, self._host)
        self._reported_s = -REPORT_AGE_S

    def run(self) -> None:
        """Work until the process ends."""
        quieten_libraries()
        try:
            self._work()
        except ChannelClosed as reason:
            _log.info("channel closed, ending: %s", reason)
            end_process(CHANNEL_CLOSED)

    def _work(self) -> NoReturn:
        owes_report = False
        while True:
            order = self._orders.take_within(REPORT_PAUSE_S if owes_report else None)
            owes_report = False
            if order is not None:
                self._work_on(order)
                self._orders.done()
                is_old = time.monotonic() - self._reported_s >= REPORT_AGE_S
                owes_report = isinstance(order.work, RunJob) and not is_old
            if not owes_report:
                self._report()

    def _work_on(self, order: Order) -> None:
        match order.work:
            case Register(spec=spec):
                self._answer(spec.name, lambda: self._models.register(spec).message())
            case LoadModel(name=name):
                self._answer(name, lambda: self._load(name, _unwatched))
            case UnloadModel(name=name, forget=forget):
                self._answer(name, lambda: self._unload(name, forget))
            case RunJob() as job:
                self._run_job(job, order.frames)

    def _answer(self, name: str, work: Callable[[], FromWorker]) -> None:
        error, answer = self._attempt(work)
        if error is not None:
            _log.warning("model=%s failed: %s", name, error.message)
            answer = ModelFailed(name=name, error=error)
        assert answer is not None
        self._channel.send(answer)

    def _load(self, name: str, on_component: OnComponent) -> ModelLoaded:
        start_s = time.monotonic()
        model = self._models.load(name, on_component)
        loading_s = time.monotonic() - start_s
        _log.info("loaded model=%s offload=%s loading_s=%.2f", name, model.offload, loading_s)
        return ModelLoaded(
            name=name, offload=model.offload, components=model.components(), loading_s=loading_s
        )

    def _unload(self, name: str, forget: bool) -> ModelUnloaded:
        self._models.unload(name)
        if forget:
            self._models.forget(name)
        return ModelUnloaded(name=name)

    def _run_job(self, job: RunJob, frames: Sequence[Frame]) -> None:
        progress = JobProgress(
            job.job, self._channel.send, lambda: self._orders.is_cancelled, time.monotonic
        )
        loading_s = 0.0
        if not self._models.is_loaded(job.model):
            error, loaded = self._attempt(lambda: self._load(job.model, progress.loading))
            if loaded is None:
                assert error is not None
                self._fail_loading(job, error)
                return
            self._channel.send(loaded)
            loading_s = loaded.loading_s
        error, done = self._attempt(lambda: self._draw(job, frames, progress, loading_s))
        if done is None:
            assert error is not None
            _log.warning("job=%s ended code=%s", job.job, error.code)
            if error.code == "storage_failed":
                # What rests on disk is gone or unreadable: the next job loads the model anew.
                self._answer(job.model, lambda: self._unload(job.model, forget=False))
            self._channel.send(JobEnded(job=job.job, error=error))
        else:
            self._channel.send(JobEnded(job=job.job, outcome=done[0]), done[1])

    def _fail_loading(self, job: RunJob, error: ErrorInfo) -> None:
        _log.warning("job=%s model=%s not loaded: %s", job.job, job.model, error.message)
        if error.code != "cancelled":
            self._channel.send(ModelFailed(name=job.model, error=error))
        self._channel.send(JobEnded(job=job.job, error=error))

    def _draw(
        self, job: RunJob, frames: Sequence[Frame], progress: JobProgress, loading_s: float
    ) -> tuple[Outcome, list[values.Frame]]:
        model = self._models.load(job.model, _unwatched)
        description = model.description
        call = prepare_call(
            values.unpack(job.arguments, [memoryview(frame) for frame in frames]),
            description.parameters,
            job.seed,
            self._device.torch_device,
            description.dtype,
        )
        meter = PeakMeter(self._device.torch_device)
        start_s = time.monotonic()
        outputs = model.run(call, progress.running, progress.at_border)
        running_s = time.monotonic() - start_s
        packed: list[values.Frame] = []
        outcome = Outcome(
            outputs=values.pack(outputs, packed),
            seeds=call.seeds,
            timings=Timings(loading_s=loading_s, running_s=running_s),
            peak_device_bytes=meter.peak_bytes(),
            moved_bytes=model.moved_bytes,
        )
        # The control plane tells of each job's end; it need not read it from us as well.
        _log.debug("job=%s model=%s drawn running_s=%.2f", job.job, job.model, running_s)
        return outcome, packed

    def _attempt(self, work: Callable[[], Any]) -> tuple[ErrorInfo | None, Any]:
        """The work's result, or its error as plain data that holds nothing else in memory."""
        try:
            return None, work()
        except ChannelClosed:
            raise
        except Exception as error:  # noqa: BLE001 - a pipeline raises anything, and the next job runs
            if is_device_fault(error):
                _log.critical("the device failed, ending: %s", sentence(error))
                end_process(DEVICE_FAULT)
            info = self._told(error)
            ran_out = is_out_of_memory(error)
        # Here the exception is gone, and with it the frames that held its tensors.
        if ran_out:
            give_memory_back(self._device.torch_device)
        return info, None

    def _told(self, error: Exception) -> ErrorInfo:
        free_bytes = measure(self._device).free_bytes
        told = to_offload_error(
            error, free_bytes, str(self._device.torch_device), self._host.engine.explain()
        )
        if isinstance(told, InternalError):
            _log.error("unexpected %s", type(error).__name__, exc_info=error)
        return error_info(told)

    def _report(self) -> None:
        self._reported_s = time.monotonic()
        self._channel.send(
            report(
                self._device,
                resident_bytes=self._models.resident_bytes,
                ring_bytes=self._host.engine.stats().ring_bytes,
                host_bytes=self._models.host_bytes,
            )
        )


def _unwatched(done: int, total: int) -> None:
    """Loading that no job waits for reports no progress."""
