"""Hands the worker's news to those they concern: models, jobs, host memory, systemd."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from offload_protocol.errors import WorkerCrashed
from offloadd.channel.messages import (
    DeviceReport,
    JobEnded,
    JobParked,
    JobProgressed,
    JobStays,
    ModelDescribed,
    ModelFailed,
    ModelLoaded,
    ModelUnloaded,
    WorkerNews,
)
from offloadd.control.jobs.dispatcher import Dispatcher
from offloadd.control.memory.memory import HostMemory
from offloadd.control.models.downloads import Downloads
from offloadd.control.models.keep_alive import KeepAlive
from offloadd.control.models.models import ModelTable
from offloadd.control.scheduling.scheduler import Scheduler
from offloadd.control.scheduling.switching import Costs
from offloadd.control.workers.deaths import Death

_log = logging.getLogger(__name__)


class Foreman:
    """The `Overseer` of a worker; `on_ready` is called with the device of each new one."""

    def __init__(
        self,
        models: ModelTable,
        dispatcher: Dispatcher,
        scheduler: Scheduler,
        memory: HostMemory,
        keep_alive: KeepAlive,
        costs: Costs,
        downloads: Downloads,
        on_ready: Callable[[DeviceReport], None],
        on_lost: Callable[[WorkerCrashed], None],
    ) -> None:
        self.device: DeviceReport | None = None
        self._models = models
        self._dispatcher = dispatcher
        self._scheduler = scheduler
        self._memory = memory
        self._keep_alive = keep_alive
        self._costs = costs
        self._downloads = downloads
        self._on_ready = on_ready
        self._on_lost = on_lost

    def on_worker_ready(self, report: DeviceReport) -> None:
        """A worker has found its device and takes orders."""
        _log.info("the worker has found its device: %s (%s)", report.device, report.name)
        self._memory.worker_ready()
        self._models.worker_ready()
        self._dispatcher.worker_ready()
        self._on_ready(report)

    def on_worker_lost(self, death: Death) -> None:
        """The worker has died."""
        self.device = None
        self._memory.worker_lost()
        loads = self._models.under_load
        self._models.worker_lost(death.error)
        self._dispatcher.worker_lost(death, loads)
        self._on_lost(death.error)

    def on_worker_news(self, news: WorkerNews, frames: list[bytearray]) -> None:
        """A worker says something."""
        match news:
            case JobProgressed():
                self._dispatcher.progressed(news, frames)
            case JobParked():
                self._dispatcher.parked(news)
            case JobStays():
                self._dispatcher.stays(news)
            case JobEnded():
                self._dispatcher.ended(news, frames)
            case DeviceReport():
                self.device = news
                self._memory.note_embeddings(news.embeddings)
                self._dispatcher.device_measured(news)
            case ModelDescribed() | ModelLoaded() | ModelFailed() | ModelUnloaded():
                self._model_news(news)
            case _:
                self._memory.on_news(news)

    def _model_news(self, news: ModelDescribed | ModelLoaded | ModelFailed | ModelUnloaded) -> None:
        match news:
            case ModelDescribed():
                self._downloads.known(news.name)
                self._models.described(news)
            case ModelLoaded():
                self._models.loaded(news)
                self._keep_alive.model_loaded(news.name)
                loaded_bytes = sum(component.bytes for component in news.components)
                self._costs.note_load(loaded_bytes, news.loading_s)
            case ModelFailed():
                if self._downloads.takes(news):
                    return
                self._models.failed(news)
            case ModelUnloaded():
                # Whoever asked hears of it when the memory is back with the system.
                self._memory.forget(news.name, partial(self._unloaded, news))
                return
        self._tell_dispatcher(news.name)

    def model_failed(self, news: ModelFailed) -> None:
        """A model was not to be had, whatever the worker would say."""
        self._models.failed(news)
        self._tell_dispatcher(news.name)

    def _unloaded(self, news: ModelUnloaded) -> None:
        self._downloads.dropped(news.name)
        self._models.unloaded(news)
        self._scheduler.model_left(news.name)
        self._tell_dispatcher(news.name)

    def _tell_dispatcher(self, name: str) -> None:
        model = self._models.get(name)
        if model is not None:
            self._dispatcher.model_known(model)
