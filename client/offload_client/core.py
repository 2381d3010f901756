"""What the two clients share: settings, life cycle, and how calls become messages and results.

Neither blocks nor waits; `Client` and `AsyncClient` add the waiting.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from offload_client.channel import Channel
from offload_client.greeting import Introduction
from offload_client.reach import obstacle, unreachable
from offload_client.records import Call, JobRecord
from offload_client.session import Session
from offload_client.waiting import ConnectionMissing, Wait
from offload_protocol.codec import check_frames, convert, encode
from offload_protocol.endpoints import EndpointChoice, client_endpoint, ipc_path
from offload_protocol.errors import InvalidRequest, TooLarge
from offload_protocol.keys import client_keys
from offload_protocol.limits import Limits, check_seed
from offload_protocol.messages import AdapterChoice, Load, Request, Submit
from offload_protocol.records import JobInfo, JobList, ModelInfo, ModelList
from offload_protocol.values import Frame, pack

QUICK_TIMEOUT_S = 10.0
"""For requests that a healthy daemon answers at once, where the caller sets no limit."""

CANCEL_TIMEOUT_S = 2.0
"""How long an interrupted `generate` waits to hear that its job is cancelled."""


class Life(Enum):
    """A client is opened by its first call or by `with`, and closed once and for all."""

    UNOPENED = "unopened"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a client was made; times in seconds."""

    endpoint: str | None
    program: str
    connect_timeout_s: float
    reconnect_timeout_s: float
    timeout_s: float | None
    retry_busy: bool
    key_file: str | os.PathLike[str] | None = None
    server_key: str | os.PathLike[str] | None = None


class Core:
    """State of a client that is not about waiting."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.life = Life.UNOPENED
        self.choice: EndpointChoice | None = None
        self._pid = os.getpid()
        self._session: Session | None = None
        self._channel: Channel | None = None
        self._identity = os.urandom(16).hex()

    # --- life cycle -----------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The conversation; only while open."""
        if self._session is None:
            raise InvalidRequest("this client is closed", hint="make a new Client")
        return self._session

    @property
    def channel(self) -> Channel:
        """The socket; only while open."""
        if self._channel is None:
            raise InvalidRequest("this client is closed", hint="make a new Client")
        return self._channel

    def peek(self) -> Session | None:
        """The conversation, or None while there is none."""
        return self._session

    def check_usable(self) -> None:
        """Raise `InvalidRequest` in a forked child or after `close`."""
        if self.is_inherited:
            raise InvalidRequest(
                f"this client belongs to process {self._pid}, not to its forked child",
                hint="make a new Client in each process",
            )
        if self.life is Life.CLOSED:
            raise InvalidRequest("this client is closed", hint="make a new Client")

    @property
    def is_inherited(self) -> bool:
        """Whether this process got the client by a fork."""
        return self._pid != os.getpid()

    def choose(self) -> EndpointChoice:
        """Apply the endpoint rules, anew at each opening."""
        self.choice = client_endpoint(self.settings.endpoint, os.environ)
        return self.choice

    def probe(self, choice: EndpointChoice) -> None:
        """Raise `Unreachable` where nothing listens; may block for the connect timeout."""
        reason = obstacle(choice.endpoint, self.settings.connect_timeout_s)
        if reason is not None:
            raise unreachable(choice, reason, 0.0)

    def open(self, choice: EndpointChoice) -> None:
        """Make session and socket."""
        from importlib.metadata import version

        keys = None
        if ipc_path(choice.endpoint) is None:
            keys = client_keys(self.settings.key_file, self.settings.server_key, os.environ)
        introduction = Introduction(self._identity, self.settings.program, version("offloadd"))
        session = Session(introduction, time.monotonic(), _random)
        self._channel = Channel(choice.endpoint, session, keys)
        self._session = session

    def shut(self) -> None:
        """Drop session and socket; in a forked child the socket is left to its owner."""
        channel, self._channel, self._session = self._channel, None, None
        if channel is not None and not self.is_inherited:
            channel.close()

    def missing(self, error: ConnectionMissing) -> Exception:
        """`Unreachable`, with what a fresh look finds in the way."""
        choice = self.choice or self.choose()
        session, channel = self._session, self._channel
        suspicion = channel.suspicion if channel is not None else None
        reason = (
            obstacle(choice.endpoint, 0.5)
            or suspicion
            or (
                "a connection stands, but the daemon does not answer on it, it may be stopped"
                if session is not None and session.connected
                else "something listens, but does not speak the daemon's protocol or is stopped"
            )
        )
        return unreachable(choice, reason, error.waited_s)

    # --- waits ----------------------------------------------------------------------------------

    def wait(
        self,
        what: str,
        timeout_s: float | None,
        *,
        since: float | None = None,
        job_known: bool = False,
    ) -> Wait:
        """The patience of a caller who began at `since`, or begins now.

        Whoever starts while there is no connection learns within the connect timeout; work that is
        under way, and jobs that the daemon already knows, outlive a restart of the daemon.
        """
        settings = self.settings
        if self._session is not None:
            self._session.ask_again(time.monotonic())
        connected = self._session is not None and self._session.ready
        grace_s = (
            settings.reconnect_timeout_s if connected or job_known else (settings.connect_timeout_s)
        )
        return Wait(what, time.monotonic() if since is None else since, timeout_s, grace_s)

    def limit_s(self, given_s: float | None, otherwise_s: float | None = None) -> float | None:
        """A call's own limit, else the client's, else `otherwise_s`."""
        if given_s is not None and not given_s >= 0:
            raise InvalidRequest(f"timeout_s is {given_s}", hint="give seconds, 0 or more, or None")
        if given_s is not None:
            return given_s
        return self.settings.timeout_s if self.settings.timeout_s is not None else otherwise_s

    # --- requests -------------------------------------------------------------------------------

    def ask(self, kind: type[Request], wait: Wait, **fields: Any) -> Call:
        """Begin a request; `fields` are those of its message."""
        return self.session.call(
            lambda rid: kind(rid=rid, **fields),
            time.monotonic(),
            patient=self.settings.retry_busy and kind is Load,
            deadline=wait.deadline,
        )

    def submit(self, submit: Submit, frames: Sequence[Frame], wait: Wait) -> tuple[JobRecord, Call]:
        """Begin a job; raises `TooLarge` where the daemon would not take it."""
        limits = self.session.limits
        if frames:
            check_frames(frames, limits)
        size_bytes = len(encode(submit))
        if size_bytes > limits.max_body_bytes:
            raise TooLarge(
                f"the request has {size_bytes} bytes beside its arrays, "
                f"the limit is {limits.max_body_bytes}",
                hint="send long lists of numbers as arrays",
            )
        return self.session.submit(
            submit,
            frames,
            time.monotonic(),
            patient=self.settings.retry_busy,
            deadline=wait.deadline,
        )

    def follow(self, job: str) -> tuple[JobRecord, Call]:
        """Begin to follow a job of old."""
        return self.session.follow(job, time.monotonic())

    def abandon(self, call: Call) -> None:
        """Forget a request, if there is still a conversation."""
        if self._session is not None:
            self._session.abandon(call)

    def take(self, record: JobRecord) -> None:
        """Say that the result is with the program."""
        self.session.take(record)


def submission(
    model: str,
    prompt: str | list[str] | None,
    arguments: Mapping[str, Any],
    limits: Limits,
    **options: Any,
) -> tuple[Submit, list[Frame]]:
    """The message of a job and its frames.

    `options` are the other fields of `Submit`; without `job` a new id is made. The arrays are
    copied, since the job may have to be said again after the program has changed them. Raises
    `InvalidRequest` or `TooLarge` for arguments that cannot be sent.
    """
    if isinstance(options.get("seed"), int):
        check_seed(options["seed"])
    named = dict(arguments) if prompt is None else {"prompt": prompt, **arguments}
    frames: list[Frame] = []
    packed = {name: pack(value, frames, limits) for name, value in named.items()}
    options["adapters"] = _adapters(options.get("adapters", ()))
    options["job"] = options.get("job") or os.urandom(16).hex()
    submit = Submit(rid=0, model=model, arguments=packed, **options)
    return submit, [bytes(frame) for frame in frames]


def _adapters(chosen: Any) -> list[AdapterChoice]:
    if chosen == ():
        return []
    try:
        return msgspec.convert(list(chosen), list[AdapterChoice])
    except (TypeError, msgspec.ValidationError) as error:
        raise InvalidRequest(
            f"the adapters are not understood: {error}",
            hint='give a list such as [{"name": "style", "weight": 0.8}]',
        ) from None


def _random() -> float:
    # The `random` module would double what a small program loads for this one number.
    return int.from_bytes(os.urandom(4)) / 2**32


def program_name() -> str:
    """What a program is called when it does not say: the name of its script."""
    return Path(sys.argv[0]).name if sys.argv else ""


def rows_of_jobs(result: Mapping[str, Any]) -> list[JobInfo]:
    """The answer to `jobs`."""
    return convert(result, JobList).jobs


def rows_of_models(result: Mapping[str, Any]) -> list[ModelInfo]:
    """The answer to `models`."""
    return convert(result, ModelList).models


def plan_fields(
    source: str | os.PathLike[str],
    options: Mapping[str, Any],
    device_budget: str | int | None,
    host_budget: str | int | None,
) -> dict[str, Any]:
    """The fields of `Plan`."""
    budgets = {"device_budget": device_budget, "host_budget": host_budget}
    given = {name: str(value) for name, value in budgets.items() if value is not None}
    return {"source": absolute_source(source), "options": absolute_options(options), **given}


def load_fields(
    name: str, source: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of `Load`."""
    source = absolute_source(source)
    return {"name": name, "source": source, "options": absolute_options(options)}


def absolute_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A model's options, with the paths among them as `absolute_source` gives them."""
    made = dict(options)
    if made.get("config") is not None:
        made["config"] = absolute_source(made["config"])
    if isinstance(made.get("components"), Mapping):
        made["components"] = {
            name: {**one, "source": absolute_source(one["source"])}
            if isinstance(one, Mapping) and one.get("source") is not None
            else one
            for name, one in made["components"].items()
        }
    return made


def absolute_source(source: str | os.PathLike[str] | None) -> str | None:
    """A model's source; a path is made absolute, since the daemon has another working directory."""
    if source is None:
        return None
    text = os.fspath(source)
    if not text:
        raise InvalidRequest("the source is empty", hint="name a directory or a hosted repository")
    # The functions of os.path, since those of Path raise for an unknown user or a name too long.
    path = Path(os.path.expanduser(text))  # noqa: PTH111
    exists = os.path.exists(path)  # noqa: PTH110
    is_path = not isinstance(source, str) or text.startswith((".", "~")) or exists
    return str(path.absolute()) if is_path else text
