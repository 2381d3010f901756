"""Every message that client and daemon exchange, as small typed structs.

A message is a msgpack map (its `op` or `type` says which) followed by frames for arrays and images.
Unknown fields are ignored, so that either side may be newer; unknown operations are refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from offload_protocol.records import ErrorInfo, JobState, Outcome

PROTOCOL_VERSION = 1


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
