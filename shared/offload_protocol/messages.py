"""Every message that client and daemon exchange, as small typed structs.

A message is a msgpack map (its `op` or `type` says which) followed by frames for arrays and images.
Unknown fields are ignored, so that either side may be newer; unknown operations are refused.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from offload_protocol.limits import Limits

PROTOCOL_VERSION = 1

JobState = Literal["queued", "loading", "running", "parked", "done", "failed", "cancelled"]
"""`queued` waits its turn, `loading` for its model, `parked` for its next turn in the middle of its
work; the last three are final."""

FINAL_STATES: frozenset[JobState] = frozenset({"done", "failed", "cancelled"})


# --- client to daemon ---------------------------------------------------------------------------


class Request(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="op", tag=str.lower
):
    """Base of all requests; `rid` is the client's own number, repeated in the answer."""

    rid: int


class Hello(Request, frozen=True):
    """First message of a connection. `session` is random and survives reconnects."""

    version: int
    session: str
    program: str = ""
    client_version: str = ""


class Ping(Request, frozen=True):
    """Asks for an empty answer."""


class AdapterChoice(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of the model, and how strongly it colours the picture."""

    name: str
    weight: float = 1.0


class Submit(Request, frozen=True):
    """Queues a job. Saying the same id with the same request again has no further effect.

    `arguments` are keyword arguments of the hosted pipeline's call; arrays and images among them
    are references to frames (see `values`). Without `seed` the daemon draws one and reports it.
    """

    job: str
    model: str
    arguments: dict[str, Any] = {}
    seed: int | None = None
    priority: int = 0
    queue_timeout_s: float | None = None
    run_timeout_s: float | None = None
    detached: bool = False
    """The job goes on when its clients have gone; otherwise it is then cancelled."""
    keep_alive_s: float | None = None
    """How long the model stays in memory after this job; below 0 for ever, 0 not at all."""
    preview_every_s: float | None = None
    """Show the running picture at most so often; not at all without it."""
    adapters: list[AdapterChoice] = []
    """Adapters for this job alone, by the names that the model's administrator gave them."""


class Fetch(Request, frozen=True):
    """Asks for a job's state, and its `Finished` if it has ended; attaches this client to it."""

    job: str


class Read(Request, frozen=True):
    """Asks for a piece of a large result: of frame `frame`, from byte `offset` on.

    The answer is empty, and behind it is a frame of as much as there is, at most
    `Limits.max_piece_bytes`.
    """

    job: str
    frame: int
    offset: int = 0


class Taken(Request, frozen=True):
    """Says that the job's result has arrived, so that the daemon may forget it.

    With `quiet` there is no answer, whatever comes of it.
    """

    job: str
    quiet: bool = False


class Cancel(Request, frozen=True):
    """Ends a job, whatever its state; answers with the state it has now."""

    job: str


class Jobs(Request, frozen=True):
    """Asks for the list of jobs that this client may see."""


class Stats(Request, frozen=True):
    """Asks for the daemon's statistics."""


class Models(Request, frozen=True):
    """Asks for the list of hosted models."""


class Load(Request, frozen=True):
    """Hosts a model. Without `source` an already known model is loaded now.

    `options` are the keys of a `[[models]]` entry other than `name` and `source`.
    """

    name: str
    source: str | None = None
    options: dict[str, Any] = {}


class Unload(Request, frozen=True):
    """Takes a model out of memory; one that came by `Load` is forgotten as well."""

    name: str


class Pin(Request, frozen=True):
    """Loads a model and keeps it in memory until `Unpin`; for administrators."""

    name: str


class Unpin(Request, frozen=True):
    """Lets a pinned model go as any other; for administrators."""

    name: str


class Plan(Request, frozen=True):
    """Says what hosting a source would take and cost, from its files' headers; loads nothing.

    `options` are as in `Load`. Budgets are sizes; without them, what the daemon has counts.
    """

    source: str
    options: dict[str, Any] = {}
    device_budget: str | None = None
    host_budget: str | None = None


class Drain(Request, frozen=True):
    """Takes no new jobs any more, and answers when the last one has ended; for administrators."""


REQUESTS: dict[str, type[Request]] = {
    request.__name__.lower(): request for request in Request.__subclasses__()
}


# --- daemon to client ---------------------------------------------------------------------------


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it travels; `code` is one of `errors.ErrorCode`."""

    code: str
    message: str
    hint: str = ""
    details: dict[str, Any] = {}


class Answer(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=str.lower
):
    """Base of all messages from the daemon."""


class Reply(Answer, frozen=True):
    """The answer to the request `rid`."""

    rid: int
    result: dict[str, Any] = {}


class Error(Answer, frozen=True):
    """The refusal of the request `rid`; `rid` is null where the message could not be read."""

    rid: int | None
    error: ErrorInfo


class Progress(Answer, frozen=True):
    """Sent while a job waits, loads and runs; may be dropped when the client reads too slowly."""

    job: str
    state: JobState
    position: int | None = None
    """Place in the queue, 1 is next; only while queued."""
    starts_in_s: float | None = None
    """An estimate of when it starts; only while queued."""
    step: int = 0
    steps: int = 0
    """As the pipeline's own progress bar counts; `steps` is 0 while unknown."""
    preview: dict[str, Any] | None = None
    """A rough picture of how far it is: an image, whose frame is behind the message."""


class Finished(Answer, frozen=True):
    """The end of a job: exactly one of `outcome` and `error` is set. Never dropped.

    Where the frames have more than `Limits.max_piece_bytes` together, they do not come behind it:
    `sizes` are their lengths, and `read` gives them piece by piece.
    """

    job: str
    state: JobState
    outcome: Outcome | None = None
    error: ErrorInfo | None = None
    sizes: list[int] = []


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
