"""Turns the daemon's answers into tables; pure, and forgiving of keys that a daemon leaves out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offload_client import Forecast, JobInfo, ModelInfo
from offload_protocol import codec
from offload_protocol.sizes import format_duration, format_size
from offloadctl.output import Table

_PLACES = (
    *("bytes", "resident_bytes", "streamed_bytes", "host_bytes", "pinned_bytes", "disk_bytes"),
    *("shared_bytes", "read_bytes"),
)
"""The figures of a component, as columns."""

RUNNING_STATES = ("loading", "running", "parked")


def stats_tables(stats: Mapping[str, Any]) -> list[Table]:
    """Everything that `stats` says."""
    return [
        _daemon_table(stats),
        _devices_table(stats.get("devices", ())),
        _store_table(stats.get("store", {})),
        _stats_models_table(stats.get("models", ())),
        _components_table(stats.get("models", ())),
        _counts_table("embeddings", stats.get("embeddings", {})),
        _counts_table("queue", stats.get("queue", {})),
        _counts_table("jobs", stats.get("jobs", {})),
        _rows_table("workers", stats.get("workers", ())),
        _rows_table("clients", stats.get("clients", ())),
    ]


def jobs_table(jobs: Iterable[JobInfo]) -> Table:
    """The queue and what runs."""
    rows = [
        (job.job, job.model, job.state, _place(job), job.program, _spent(job), _yes(job.mine))
        for job in jobs
    ]
    headings = ("JOB", "MODEL", "STATE", ">STEP", "PROGRAM", ">TIME", "MINE")
    return Table("jobs", headings, rows)


def models_table(models: Iterable[ModelInfo]) -> Table:
    """The hosted models and where they come from."""
    rows = [
        (
            model.name,
            _state(model),
            model.pipeline,
            model.dtype,
            model.offload,
            format_size(model.bytes),
            model.source,
        )
        for model in models
    ]
    headings = ("MODEL", "STATE", "PIPELINE", "DTYPE", "OFFLOAD", ">SIZE", "SOURCE")
    return Table("models", headings, rows)


def _state(model: ModelInfo) -> str:
    if model.error is not None:
        return f"{model.state} ({model.error.code})"
    if model.download is not None and model.download.total_bytes:
        share = model.download.done_bytes / model.download.total_bytes
        return f"{model.state} {share:.0%} of {format_size(model.download.total_bytes)}"
    return model.state


def models_tables(models: Sequence[ModelInfo]) -> list[Table]:
    """The hosted models, and what is to be said about their settings."""
    notes = [(model.name, note) for model in models for note in model.notes]
    tables = [models_table(models), Table("notes", ("MODEL", "NOTE"), notes)]
    return tables if notes else tables[:1]


def forecast_tables(forecast: Forecast) -> list[Table]:
    """What hosting a model would take."""
    parts = [
        (
            part.name,
            part.kind,
            part.offload,
            *(
                format_size(size)
                for size in (
                    part.bytes,
                    part.kept_bytes + part.resident_bytes,
                    part.ring_bytes,
                    part.streamed_bytes,
                    part.host_bytes,
                )
            ),
            format_duration(part.step_s),
        )
        for part in forecast.components
    ]
    headings = (
        *("COMPONENT", "KIND", "OFFLOAD", ">SIZE", ">RESIDENT", ">RING", ">STREAMED", ">HOST"),
        ">STEP",
    )
    notes = [("note", note) for note in forecast.notes]
    return [
        Table("plan", ("KEY", "VALUE"), [*_forecast_rows(forecast), *notes]),
        Table("components", headings, parts),
    ]


def _forecast_rows(forecast: Forecast) -> list[tuple[str, str]]:
    link = f"{format_size(forecast.link_bytes_per_s)}/s"
    sure = "measured" if forecast.link_is_measured else "guessed until a model was streamed"
    computes = all(part.compute_s is not None for part in forecast.components)
    rows = [
        ("pipeline", forecast.pipeline),
        ("dtype", forecast.dtype),
        ("offload", forecast.offload),
        ("on the device", format_size(forecast.device_bytes)),
        ("in host memory", format_size(forecast.host_bytes)),
        ("smallest device budget", format_size(forecast.minimum_budget_bytes)),
        ("best device budget", format_size(forecast.best_budget_bytes)),
        ("link", f"{link}, {sure}"),
    ]
    if not computes:
        rows.append(("steps", "transfers alone: what it computes is known once it has run"))
    return rows


def ps_tables(models: Sequence[ModelInfo], jobs: Sequence[JobInfo]) -> list[Table]:
    """Where the bytes of each model are, and what runs on it now."""
    rows = []
    for model in models:
        parts = model.components
        running = [
            f"{job.job[:12]} {_place(job)}".strip()
            for job in jobs
            if job.model == model.name and job.state in RUNNING_STATES
        ]
        rows.append(
            (
                model.name,
                model.state,
                model.offload,
                format_size(sum(part.resident_bytes for part in parts)),
                format_size(sum(part.streamed_bytes for part in parts)),
                format_size(sum(part.host_bytes for part in parts)),
                ", ".join(running) or "-",
                _until(model),
                model.reason or "-",
            )
        )
    headings = (
        *("MODEL", "STATE", "OFFLOAD", ">RESIDENT", ">STREAMED", ">HOST"),
        *("RUNNING", "UNTIL", "REASON"),
    )
    return [Table("models", headings, rows), _components_table(map(codec.plain, models))]


def _components_table(models: Iterable[Mapping[str, Any]]) -> Table:
    """The components that are somewhere; of a model that is not loaded, what memory still has."""
    rows = [
        (
            f"{model['name']}/{part['name']}",
            str(part.get("kind", "")),
            str(part.get("offload", "")),
            *(format_size(part.get(key, 0)) for key in _PLACES),
            f"{format_size(part.get('read_bytes_per_s', 0))}/s",
        )
        for model in models
        for part in model.get("components", ())
        if (model.get("state") == "ready" and part.get("bytes")) or part.get("host_bytes")
    ]
    places = (">SIZE", *(f">{_name(key).upper()}" for key in _PLACES[1:]))
    return Table("components", ("COMPONENT", "KIND", "OFFLOAD", *places, ">RATE"), rows)


def _daemon_table(stats: Mapping[str, Any]) -> Table:
    daemon = stats.get("daemon", {})
    rows = [(_name(key), _cell(key, daemon[key])) for key in daemon]
    return Table("daemon", ("KEY", "VALUE"), rows)


def _devices_table(devices: Iterable[Mapping[str, Any]]) -> Table:
    return _rows_table("devices", devices)


def _store_table(store: Mapping[str, Any]) -> Table:
    return Table(
        "store", ("KEY", ">VALUE"), [(_name(key), _cell(key, store[key])) for key in store]
    )


def _stats_models_table(models: Iterable[Mapping[str, Any]]) -> Table:
    rows = []
    for model in models:
        parts = model.get("components", ())
        sums = [
            format_size(sum(part.get(key, 0) for part in parts))
            for key in ("bytes", "resident_bytes", "streamed_bytes", "host_bytes")
        ]
        names = [str(model.get(key, "")) for key in ("name", "state", "pipeline", "offload")]
        rows.append((*names, *sums))
    headings = ("NAME", "STATE", "PIPELINE", "OFFLOAD", ">SIZE", ">RESIDENT", ">STREAMED", ">HOST")
    return Table("models", headings, rows)


def _counts_table(title: str, counts: Mapping[str, Any]) -> Table:
    return Table(
        title,
        tuple(f">{_name(key, counts).upper()}" for key in counts),
        [_cells(counts)] if counts else [],
    )


def _rows_table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    rows = list(rows)
    keys = list(rows[0]) if rows else []
    headings = tuple(
        f">{_name(key).upper()}" if isinstance(rows[0][key], (int, float)) else key.upper()
        for key in keys
    )
    return Table(title, headings, [[_cell(key, row.get(key)) for key in keys] for row in rows])


def _cells(data: Mapping[str, Any]) -> list[str]:
    return [_cell(key, data[key]) for key in data]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if "bytes" in key.split("_"):
            return format_size(value)
        if key.endswith("_s"):
            return format_duration(value)
    return str(value)


def _name(key: str, others: Iterable[str] = ()) -> str:
    """The words of a key without its unit, which the value shows; unless another has the same."""
    short = _short(key)
    same = sum(_short(other) == short for other in others)
    return (key if same > 1 else short).replace("_", " ")


def _short(key: str) -> str:
    for ending in ("_total", "_bytes", "_s"):
        key = key.removesuffix(ending)
    return key


def _place(job: JobInfo) -> str:
    if job.position is not None:
        return f"#{job.position}"
    return f"{job.step}/{job.steps}" if job.steps else ""


def _until(model: ModelInfo) -> str:
    if model.pinned:
        return "pinned"
    if model.expires_at is None:
        return "-"
    return time.strftime("%H:%M:%S", time.localtime(model.expires_at))


def _spent(job: JobInfo) -> str:
    spent_s = job.timings.queued_s + job.timings.loading_s + job.timings.running_s
    return format_duration(spent_s) if spent_s else ""


def _yes(value: bool) -> str:
    return "yes" if value else ""
