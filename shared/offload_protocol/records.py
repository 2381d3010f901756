"""What messages carry: jobs, models, results, forecasts and errors, as small typed structs.

Unknown fields are ignored, so that either side may be newer.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from offload_protocol.limits import Limits

JobState = Literal["queued", "loading", "running", "parked", "done", "failed", "cancelled"]
"""`queued` waits its turn, `loading` for its model, `parked` for its next turn in the middle of its
work; the last three are final."""

FINAL_STATES: frozenset[JobState] = frozenset({"done", "failed", "cancelled"})


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it travels; `code` is one of `errors.ErrorCode`."""

    code: str
    message: str
    hint: str = ""
    details: dict[str, Any] = {}


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a job spent waiting, waiting for its model to load, computing, and giving way."""

    queued_s: float = 0.0
    loading_s: float = 0.0
    running_s: float = 0.0
    parked_s: float = 0.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a job made. `outputs` maps the pipeline's output names to values (see `values`)."""

    outputs: dict[str, Any]
    seeds: list[int]
    """The seed of each picture of the batch; each can be made again alone from its own."""
    timings: Timings = Timings()
    peak_device_bytes: int = 0
    moved_bytes: int = 0
    """Bytes of weights that were copied to the device for this job."""


# --- results of requests ------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `hello`."""

    version: int
    daemon_version: str
    instance: str
    """Changes whenever the daemon starts anew."""
    limits: Limits


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `submit`, `fetch`, `cancel` and each row of `jobs`."""

    job: str
    model: str
    state: JobState
    program: str = ""
    position: int | None = None
    starts_in_s: float | None = None
    step: int = 0
    steps: int = 0
    submitted_at: float = 0.0
    """Seconds since the epoch."""
    timings: Timings = Timings()
    mine: bool = True


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `jobs`, oldest first."""

    jobs: list[JobInfo]


class ComponentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One component of a hosted model and where its bytes are.

    `resident_bytes` are on the device to stay, `streamed_bytes` pass through it at each step.
    `host_bytes` are in host memory, of which `pinned_bytes` are page-locked and `shared_bytes` are
    used by other components too; `disk_bytes` are on disk alone. `read_bytes` were read from disk
    since it was loaded, at `read_bytes_per_s`.
    """

    name: str
    kind: str = ""
    bytes: int = 0
    resident_bytes: int = 0
    streamed_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    shared_bytes: int = 0
    disk_bytes: int = 0
    read_bytes: int = 0
    read_bytes_per_s: int = 0
    offload: str = ""
    files: list[str] = []
    """The files that its weights were found in, within the component's directory."""
    variant: str = ""
    """The variant of these files; empty for the plain ones."""


class DownloadInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How far the download of a model is; both are 0 until its files are known."""

    done_bytes: int = 0
    total_bytes: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Each row of `models`, and the result of `load`, `unload`, `pin` and `unpin`."""

    name: str
    source: str = ""
    pipeline: str = ""
    state: Literal["registered", "downloading", "loading", "ready", "failed"] = "registered"
    offload: str = ""
    dtype: str = ""
    bytes: int = 0
    components: list[ComponentInfo] = []
    error: ErrorInfo | None = None
    pinned: bool = False
    expires_at: float | None = None
    """When it leaves memory unless it is used, in seconds since the epoch; null: it stays."""
    reason: str = ""
    """Why it is in memory, or why it left."""
    notes: list[str] = []
    """Sentences about its settings that whoever gave them should read."""
    download: DownloadInfo | None = None
    """While it is being downloaded."""


class ComponentForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One component as it would be hosted; bytes are of weights.

    `kept_bytes` (small layers, buffers) stay on the device whatever the plan, `resident_bytes`
    besides; `streamed_bytes` pass through the ring at each step. `step_s` counts transfers where
    `compute_s` is not known.
    """

    name: str
    kind: str = ""
    bytes: int = 0
    offload: str = ""
    groups: int = 0
    kept_bytes: int = 0
    resident_bytes: int = 0
    ring_bytes: int = 0
    streamed_bytes: int = 0
    host_bytes: int = 0
    step_s: float = 0.0
    compute_s: float | None = None


class BudgetStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of each component would take and stream with another device budget."""

    budget_bytes: int
    streamed_bytes: int
    step_s: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `plan`."""

    source: str
    pipeline: str
    dtype: str
    offload: str
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    minimum_budget_bytes: int = 0
    """The smallest device budget that works."""
    device_bytes: int = 0
    """What weights will take of the device once every component has run."""
    host_bytes: int = 0
    link_bytes_per_s: float = 0.0
    link_is_measured: bool = False
    best_budget_bytes: int = 0
    """The smallest device budget within 2% of the shortest step."""
    components: list[ComponentForecast] = []
    budgets: list[BudgetStep] = []
    notes: list[str] = []


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `models`, by name."""

    models: list[ModelInfo]
