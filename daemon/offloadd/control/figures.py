"""What `stats` shows, gathered from every part of the control plane; it changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from offload_protocol.records import ModelInfo
from offloadd.control import stats
from offloadd.control.clients.roles import Roles
from offloadd.control.clients.sessions import Session, Sessions
from offloadd.control.jobs.dispatcher import Dispatcher
from offloadd.control.jobs.endings import Endings
from offloadd.control.memory.memory import HostMemory
from offloadd.control.memory.whereabouts import located
from offloadd.control.models.models import ModelTable
from offloadd.control.scheduling.scheduler import Scheduler
from offloadd.control.workers.foreman import Foreman
from offloadd.control.workers.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Identity:
    """What a daemon says of itself; `started_s` is by the clock of `Figures`."""

    version: str
    endpoint: str
    started_s: float
    queue_limit: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The parts that are asked. `state` and `protocol_errors` are the daemon's own."""

    identity: Identity
    models: ModelTable
    memory: HostMemory
    foreman: Foreman
    dispatcher: Dispatcher
    scheduler: Scheduler
    endings: Endings
    supervisor: Supervisor
    sessions: Sessions
    roles: Roles
    clock: Callable[[], float]
    state: Callable[[], str]
    protocol_errors: Callable[[], int]

    def located(self, infos: Iterable[ModelInfo]) -> list[ModelInfo]:
        """The models with where each component's bytes are now."""
        held, readings = self.memory.held(), self.memory.readings()
        device = self.foreman.device
        placed = device.placed if device is not None else {}
        return [located(info, placed, held, readings) for info in infos]

    def stats(self, session: Session) -> dict[str, Any]:
        """The whole of `stats`, as far as whoever asks may see it."""
        peer, now_s = session.connection.peer, self.clock()
        facts = stats.DaemonFacts(
            version=self.identity.version,
            pid=os.getpid(),
            uptime_s=now_s - self.identity.started_s,
            endpoint=self.identity.endpoint,
            state=self.state(),
            protocol_errors_total=self.protocol_errors(),
            messages_dropped_total=self.sessions.dropped_total,
        )
        sees_all = self.roles.administrates(peer)
        infos = self.located([model.info() for model in self.models])
        return {
            "daemon": stats.daemon(facts),
            "devices": stats.devices(self.foreman.device),
            "store": stats.store(self.memory.figures(), infos, self.memory.held()),
            "embeddings": self.memory.embedding_figures(),
            "models": stats.models(infos),
            "queue": stats.queue(len(self.scheduler), self.dispatcher, self.identity.queue_limit),
            "jobs": stats.jobs(self.endings.totals, self.endings.results),
            "workers": stats.workers(self.supervisor),
            "clients": stats.clients(self.sessions, peer.user, sees_all, now_s),
        }
