"""The control plane put together: one event loop owns all of it, from the start to the stop."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from offload_protocol.errors import OffloadError, ShuttingDown, WorkerCrashed
from offload_protocol.limits import DEFAULT_LIMITS, Limits
from offloadd.channel.messages import DeviceReport
from offloadd.config import Config
from offloadd.control.clients.entrances import Entrance
from offloadd.control.clients.front import Front
from offloadd.control.clients.handlers import Handlers
from offloadd.control.clients.leases import RETURN_S, Leases
from offloadd.control.clients.roles import Roles
from offloadd.control.clients.router import Router
from offloadd.control.clients.sessions import Sessions
from offloadd.control.clients.telling import Telling
from offloadd.control.clocks import Clocks
from offloadd.control.figures import Figures, Identity
from offloadd.control.jobs.admission import Admission
from offloadd.control.jobs.arguments import Bounds as ArgumentBounds
from offloadd.control.jobs.dispatcher import Dispatcher
from offloadd.control.jobs.endings import Endings
from offloadd.control.jobs.recovery import recover
from offloadd.control.journal.journal import Journal
from offloadd.control.memory.host_budget import budget_bytes, measure
from offloadd.control.memory.inheritance import Inheritance
from offloadd.control.memory.memory import HostMemory
from offloadd.control.models.downloads import Downloads
from offloadd.control.models.forecasting import Forecasts
from offloadd.control.models.keep_alive import KeepAlive
from offloadd.control.models.models import ModelTable
from offloadd.control.notify import Notifier, StoredDescriptors
from offloadd.control.scheduling.scheduler import Bounds as QueueBounds
from offloadd.control.scheduling.scheduler import Scheduler
from offloadd.control.scheduling.switching import Costs
from offloadd.control.tidying import clear_out_packs
from offloadd.control.workers.foreman import Foreman
from offloadd.control.workers.supervisor import (
    DEFAULT_PATIENCE,
    WORKER_COMMAND,
    Patience,
    Supervisor,
)

TICK_S = 0.25
"""How exact deadlines are, and how often places in the queue are told."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a server is given beside its configuration."""

    version: str
    entrances: tuple[Entrance, ...]
    """The first one's endpoint is the daemon's own."""
    state_dir: Path
    roles: Roles
    environ: Mapping[str, str]
    worker_command: Sequence[str] = WORKER_COMMAND
    patience: Patience = DEFAULT_PATIENCE
    limits: Limits = DEFAULT_LIMITS
    clock: Callable[[], float] = time.monotonic


class Server:
    """Made and run within an event loop; `stop` may be called from a signal handler of the loop."""

    def __init__(self, config: Config, setting: Setting) -> None:
        self._config = config
        self._setting = setting
        self._clock = setting.clock
        self._stopping = asyncio.Event()
        self._was_ready = False
        self._notifier = Notifier(setting.environ)
        silence_s = config.clients.lease - RETURN_S
        self._routers = [
            Router(entrance.listener, setting.limits, silence_s, entrance.curve)
            for entrance in setting.entrances
        ]
        self._supervisor = Supervisor(
            config.daemon.device,
            setting.clock,
            setting.state_dir,
            setting.environ,
            setting.worker_command,
            setting.patience,
        )
        self._memory = self._new_memory()
        # Seeds are drawn short, so that people can say them.
        clocks = Clocks(setting.clock, time.time, partial(random.SystemRandom().getrandbits, 32))
        self._journal, recovered = Journal.open(
            setting.state_dir, config.journal.sync, asyncio.get_running_loop()
        )
        self._sessions = Sessions(lambda key: self._endings.results.message(key))
        self._models = ModelTable(
            config.models,
            self._supervisor.send,
            setting.clock,
            self._journal.host_model,
            self._journal.forget_model,
            self._journal.pin_model,
        )
        for spec in recovered.models:
            self._models.restore(spec)
        for name in recovered.pins:
            self._models.restore_pin(name)
        self._costs = Costs(self._models, lambda: self._foreman.device)
        self._scheduler = Scheduler(_queue_bounds(config), self._costs.switch_s)
        telling = Telling(self._sessions)
        self._endings = Endings(
            config.results.max_bytes,
            config.results.keep,
            clocks,
            self._journal,
            telling,
            lambda job: self._keep_alive.job_ended(job),
        )
        self._keep_alive = KeepAlive(
            self._models, self._endings.table.uses, config.hosting.keep_alive, clocks
        )
        self._dispatcher = self._new_dispatcher(clocks, telling)
        self._leases = Leases()
        recover(
            recovered,
            self._dispatcher,
            self._endings,
            self._leases,
            config.clients.lease,
            clocks,
        )
        self._downloads = Downloads(
            self._models,
            config.hosting.download,
            setting.environ,
            lambda news: self._foreman.model_failed(news),
        )
        self._foreman = Foreman(
            self._models,
            self._dispatcher,
            self._scheduler,
            self._memory,
            self._keep_alive,
            self._costs,
            self._downloads,
            self._worker_is_ready,
            self._worker_is_lost,
        )
        figures = self._new_figures()
        self._handlers = Handlers(
            self._sessions,
            self._dispatcher,
            self._models,
            self._endings,
            setting.roles,
            setting.clock,
            figures.stats,
            figures.located,
            Forecasts(
                self._models,
                lambda: self._foreman.device,
                lambda: self._memory.catalogue.budget_bytes,
                setting.environ,
            ),
            setting.limits,
        )
        self._front = Front(
            self._sessions,
            self._handlers,
            setting.limits,
            setting.version,
            instance=secrets.token_hex(8),
            clock=setting.clock,
            leases=self._leases,
            roles=setting.roles,
            books=self._journal,
        )
        for router in self._routers:
            router.start(self._front)

    def _new_memory(self) -> HostMemory:
        has_manager = bool(self._setting.environ.get("NOTIFY_SOCKET"))
        stored = StoredDescriptors(self._setting.environ, self._notifier) if has_manager else None
        setting = self._config.store.host_budget
        return HostMemory(
            lambda _, message, descriptors: self._supervisor.send(message, (), descriptors),
            lambda held_bytes: budget_bytes(measure(), held_bytes, setting),
            lambda: self._models.pinned,
            self._clock,
            Inheritance(stored),
            self._config.hosting.embeddings,
        )

    def _new_dispatcher(self, clocks: Clocks, telling: Telling) -> Dispatcher:
        limits = self._config.limits
        bounds = ArgumentBounds(
            limits.max_steps, limits.max_pixels, limits.max_images, limits.max_frames
        )
        return Dispatcher(
            self._scheduler,
            self._models,
            self._endings,
            Admission(self._models, self._setting.limits, bounds, clocks),
            self._journal,
            self._clock,
            telling,
            self._supervisor.send,
            self._config.queue.max_parked,
            self._config.queue.max_sweep,
        )

    def _new_figures(self) -> Figures:
        setting = self._setting
        endpoint = setting.entrances[0].listener.endpoint
        started_s, limit = self._clock(), self._config.queue.limit
        return Figures(
            Identity(setting.version, endpoint, started_s, limit),
            self._models,
            self._memory,
            self._foreman,
            self._dispatcher,
            self._scheduler,
            self._endings,
            self._supervisor,
            self._sessions,
            setting.roles,
            self._clock,
            lambda: self.state,
            lambda: self._front.protocol_errors_total,
        )

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `stop`."""
        for entrance in self._setting.entrances:
            _log.info("offloadd %s serves %s", self._setting.version, entrance.listener.endpoint)
        self._notifier.status("Waiting for the worker to find its device")
        await asyncio.to_thread(clear_out_packs, self._config.store.pack_cache)
        async with asyncio.TaskGroup() as tasks:
            supervision = tasks.create_task(self._supervisor.run(self._foreman))
            beats = [tasks.create_task(self._tick()), tasks.create_task(self._feed_watchdog())]
            stopped = tasks.create_task(self._stopping.wait())
            # The supervision ends by itself only through a fault, which the group then raises.
            await asyncio.wait((stopped, supervision), return_when=asyncio.FIRST_COMPLETED)
            await self._wind_down()
            await supervision
            for beat in beats:
                beat.cancel()
        await self._downloads.close()
        await self._memory.close()
        self._journal.close()
        for router in self._routers:
            router.close()

    def stop(self) -> None:
        """Begin to stop: no new work; what runs and what waits stays in the journal."""
        self._stopping.set()

    async def _wind_down(self) -> None:
        _log.info("stopping")
        self._notifier.stopping()
        error = ShuttingDown("the daemon is stopping", hint="submit the job again when it is back")
        self._refuse_work(error)
        self._endings.close(error)
        # The running job stays in the journal as one that has not ended: the next daemon runs it.
        self._supervisor.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._front.part_from_banned()
            for client in self._leases.expired(self._clock()):
                self._dispatcher.client_gone(client)
            self._dispatcher.tick()
            self._keep_alive.tick()
            self._memory.tick()

    async def _feed_watchdog(self) -> None:
        interval_s = self._notifier.watchdog_interval_s
        while interval_s is not None:
            self._notifier.watchdog()
            await asyncio.sleep(interval_s)

    @property
    def state(self) -> str:
        """`starting` until the worker has found its device, `ready`, `draining` or `stopping`."""
        if self._stopping.is_set():
            return "stopping"
        if self._handlers.is_draining:
            return "draining"
        return "ready" if self._was_ready else "starting"

    # --- what concerns the worker ---------------------------------------------------------------

    def _worker_is_ready(self, report: DeviceReport) -> None:
        if self._stopping.is_set():
            return
        status = f"Serving on {report.device} ({report.name})"
        if self._was_ready:
            self._notifier.status(status)
        else:
            self._notifier.ready(status)
        self._was_ready = True
        if not self._handlers.is_draining:
            self._dispatcher.refuse(None)
        self._handlers.refuse_changes(None)

    def _worker_is_lost(self, cause: WorkerCrashed) -> None:
        if self._stopping.is_set():
            return
        self._notifier.status(cause.message)
        if self._supervisor.state == "failed":
            self._refuse_work(
                WorkerCrashed(
                    f"no worker stays alive: {cause.message}",
                    hint="see the daemon's log; it goes on trying",
                    details=cause.details,
                )
            )

    def _refuse_work(self, error: OffloadError) -> None:
        self._dispatcher.refuse(error)
        self._handlers.refuse_changes(error)
        self._models.close(error)


def _queue_bounds(config: Config) -> QueueBounds:
    queue = config.queue
    return QueueBounds(queue.limit, queue.per_user_limit, queue.max_bytes, queue.model_turn)
