"""Every message between the control plane and a worker, as small typed structs.

Both ends are the same installation, so there is no version here. Arrays and images travel as frames
beside the message, as on the wire; the control plane passes them on without looking inside.
"""

from __future__ import annotations

from typing import Any

import msgspec

from offload_protocol.messages import AdapterChoice
from offload_protocol.records import ComponentInfo, ErrorInfo, JobState, Outcome
from offloadd.channel.arena import ArenaNews, ArenaOrder
from offloadd.channel.base import FromWorker as FromWorker
from offloadd.channel.base import ToWorker as ToWorker
from offloadd.channel.specs import ModelSpec


class Register(ToWorker, frozen=True):
    """Makes a model known. Answered with `ModelDescribed` or `ModelFailed`; loads no weights."""

    spec: ModelSpec


class LoadModel(ToWorker, frozen=True):
    """Loads a registered model. Answered with `ModelLoaded` or `ModelFailed`."""

    name: str


class UnloadModel(ToWorker, frozen=True):
    """Takes a model out of memory; with `forget`, it is no longer registered either."""

    name: str
    forget: bool = False


class RunJob(ToWorker, frozen=True):
    """Runs a job on a registered model, which is loaded first if need be, beside other turns.

    With `awaits_turn` the job says `JobParked` once its model is loaded, and waits for `ResumeJob`.
    """

    job: str
    model: str
    arguments: dict[str, Any]
    seed: int
    awaits_turn: bool = False
    is_alone: bool = False
    """It shares nothing with other jobs on the device."""
    preview_every_s: float | None = None
    """How often at most its running picture is shown; None: not at all."""
    owner: str | None = None
    """Who asked; what text encoders gave is used again for nobody else, and for None not at all."""
    adapters: list[AdapterChoice] = msgspec.field(default_factory=list)
    """What the model wears for this job; jobs that have the device together wear the same."""


class GiveWay(ToWorker, frozen=True):
    """Parks the running job at its next border.

    Answered with `JobParked`, `JobStays`, or the job's end.
    """

    job: str


class ResumeJob(ToWorker, frozen=True):
    """Gives a parked job its next turn."""

    job: str


class CancelJob(ToWorker, frozen=True):
    """Ends a job at its next border, or where it waits; answered with `JobEnded` as any end."""

    job: str


class LimitEmbeddings(ToWorker, frozen=True):
    """Bounds what text encoders gave and is kept for later jobs; until it is said, nothing is."""

    limit_bytes: int


class EmbeddingFigures(msgspec.Struct, frozen=True):
    """What is kept of text encoders' answers, and what became of calls since the worker began."""

    entries: int = 0
    size_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0


class Placed(msgspec.Struct, frozen=True):
    """A component's weights: on the device to stay, through it at each step, in host memory."""

    resident_bytes: int
    streamed_bytes: int
    host_bytes: int


class DeviceReport(FromWorker, frozen=True):
    """The device and its memory; the first one says that the worker has found its device."""

    device: str
    name: str
    total_bytes: int
    free_bytes: int
    resident_bytes: int = 0
    ring_bytes: int = 0
    host_bytes: int = 0
    parked_bytes: int = 0
    """Of jobs that gave way."""
    reusable_bytes: int = 0
    """Not free, but kept by the worker's allocator for what comes next."""
    placed: dict[str, Placed] = msgspec.field(default_factory=dict)
    """Of the models in memory, by `MODEL/COMPONENT`."""
    link_bytes_per_s: float = 0.0
    """How fast weights come to the device; 0 until a model has been streamed."""
    compute_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds that a step of `MODEL/COMPONENT` computes, where it has been measured."""
    embeddings: EmbeddingFigures = EmbeddingFigures()


class ParameterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A keyword argument that the hosted pipeline's call takes.

    `kinds` are among `bool`, `int`, `float`, `str`, `list`, `map`, `image`, `array`, `none`; an
    empty list means that any of them may do.
    """

    name: str
    kinds: list[str] = []
    required: bool = False
    items: list[str] = []
    """Kinds of a list's items, where they are all plain; empty where they may be others."""


class ModelDescribed(FromWorker, frozen=True):
    """What a registered model is, from its files' headers and its pipeline's signature."""

    name: str
    pipeline: str
    dtype: str
    offload: str
    components: list[ComponentInfo]
    parameters: list[ParameterInfo]
    size_multiple: int = 8
    """Pictures' height and width must be multiples of this."""
    notes: list[str] = msgspec.field(default_factory=list)
    """Sentences about settings that are taken and change nothing."""


class ModelLoaded(FromWorker, frozen=True):
    """A model is ready; `offload` is what `auto` chose."""

    name: str
    offload: str
    components: list[ComponentInfo]
    loading_s: float


class ModelFailed(FromWorker, frozen=True):
    """A model cannot be described or loaded."""

    name: str
    error: ErrorInfo


class ModelUnloaded(FromWorker, frozen=True):
    """A model's memory has been given back."""

    name: str


class JobProgressed(FromWorker, frozen=True):
    """A job's model loads (`loading`) or its pipeline computes (`running`).

    `preview` is an image value, whose frame is behind the message.
    """

    job: str
    state: JobState
    step: int = 0
    steps: int = 0
    preview: dict[str, Any] | None = None


class JobParked(FromWorker, frozen=True):
    """A job waits for `ResumeJob`; `held_bytes` is what its own tensors take meanwhile.

    `is_better_shared`: jobs on its model take less time together than one after the other.
    """

    job: str
    held_bytes: int = 0
    is_better_shared: bool = False


class JobStays(FromWorker, frozen=True):
    """A job was to give way and cannot: there is no room for what it would leave behind."""

    job: str


class JobEnded(FromWorker, frozen=True):
    """The end of a job, with its outcome or its error; frames belong to the outcome.

    `is_better_shared` as in `JobParked`. `activations_bytes`: what was on the device at the worst
    moment besides what is there now, that is, weights; 0 where it cannot be told.
    """

    job: str
    outcome: Outcome | None = None
    error: ErrorInfo | None = None
    is_better_shared: bool = False
    activations_bytes: int = 0


WorkerOrder = (
    Register
    | LoadModel
    | UnloadModel
    | RunJob
    | GiveWay
    | ResumeJob
    | CancelJob
    | LimitEmbeddings
    | ArenaOrder
)
WorkerNews = (
    DeviceReport
    | ModelDescribed
    | ModelLoaded
    | ModelFailed
    | ModelUnloaded
    | JobProgressed
    | JobParked
    | JobStays
    | JobEnded
    | ArenaNews
)
