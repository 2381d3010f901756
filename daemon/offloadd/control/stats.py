"""The answer to `stats`: plain data from the parts' states; its keys change only with a version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offload_protocol import codec
from offload_protocol.records import ModelInfo
from offloadd.channel.messages import DeviceReport
from offloadd.control.clients.sessions import Session
from offloadd.control.jobs.dispatcher import Dispatcher
from offloadd.control.jobs.endings import Totals
from offloadd.control.jobs.results import Results
from offloadd.control.memory.extents import Held
from offloadd.control.memory.whereabouts import owner_of
from offloadd.control.workers.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """The daemon itself."""

    version: str
    pid: int
    uptime_s: float
    endpoint: str
    state: str
    protocol_errors_total: int
    messages_dropped_total: int


def daemon(facts: DaemonFacts) -> dict[str, Any]:
    """The key `daemon`."""
    return {name: getattr(facts, name) for name in DaemonFacts.__slots__}


def devices(report: DeviceReport | None) -> list[dict[str, Any]]:
    """The key `devices`: empty until the worker has found its device."""
    if report is None:
        return []
    return [
        {
            "id": report.device,
            "name": report.name,
            "total_bytes": report.total_bytes,
            "free_bytes": report.free_bytes,
            # Nothing bounds the weights below the device's size yet.
            "budget_bytes": report.total_bytes,
            "resident_bytes": report.resident_bytes,
            "ring_bytes": report.ring_bytes,
            "parked_bytes": report.parked_bytes,
        }
    ]


def store(
    figures: Mapping[str, int], infos: Iterable[ModelInfo], held: Mapping[str, Held]
) -> dict[str, int]:
    """The key `store`; what models hold outside the store counts as used as well."""
    outside_bytes = sum(
        component.host_bytes
        for info in infos
        for component in info.components
        if owner_of(info.name, component.name) not in held
    )
    return {**figures, "host_used_bytes": figures["host_used_bytes"] + outside_bytes}


def models(infos: Iterable[ModelInfo]) -> list[dict[str, Any]]:
    """The key `models`, each with its components and where their bytes are."""
    return [codec.plain(info) for info in infos]


def queue(waiting: int, dispatcher: Dispatcher, limit: int) -> dict[str, int]:
    """The key `queue`."""
    turns = dispatcher.turns
    return {
        "depth": waiting - sum(job.stopping is None for job in turns.parked.values()),
        "running": len(turns.going()),
        "parked": len(turns.parked),
        "loading": len(turns.loading),
        "limit": limit,
    }


def jobs(totals: Totals, results: Results) -> dict[str, int]:
    """The key `jobs`."""
    return {
        "completed_total": totals.completed,
        "failed_total": totals.failed,
        "cancelled_total": totals.cancelled,
        "requeued_total": totals.requeued,
        "results_kept": len(results),
        "results_kept_bytes": results.kept_bytes,
        "results_evicted_total": results.evicted_total,
    }


def workers(supervisor: Supervisor) -> list[dict[str, Any]]:
    """The key `workers`."""
    cause = supervisor.last_cause
    return [
        {
            "device": supervisor.device,
            "pid": supervisor.pid,
            "state": supervisor.state,
            "restarts_total": supervisor.restarts_total,
            "last_error": cause.message if cause else None,
        }
    ]


def clients(sessions: Iterable[Session], viewer: str, sees_all: bool, now_s: float) -> Any:
    """The key `clients`: the viewer's own, or all for an administrator."""
    return [
        {
            "program": session.program,
            "version": session.client_version,
            "user": session.connection.peer.name,
            "uid": getattr(session.connection.peer, "uid", None),
            "pid": getattr(session.connection.peer, "pid", None),
            "connected_s": now_s - session.connected_s,
            "waiting_bytes": session.outbox.held_bytes,
        }
        for session in sessions
        if sees_all or session.user == viewer
    ]
