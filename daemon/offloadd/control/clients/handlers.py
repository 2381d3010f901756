"""What the daemon does for each request of a client that has introduced itself."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from offload_protocol.errors import InvalidRequest, OffloadError, ShuttingDown, UnknownJob
from offload_protocol.limits import Limits
from offload_protocol.messages import (
    Cancel,
    Drain,
    Fetch,
    Jobs,
    Load,
    Models,
    Pin,
    Ping,
    Plan,
    Read,
    Request,
    Stats,
    Submit,
    Taken,
    Unload,
    Unpin,
)
from offload_protocol.records import Forecast, JobInfo, JobList, ModelInfo, ModelList
from offloadd.channel.checked_specs import model_spec
from offloadd.channel.specs import ModelSpec
from offloadd.config_files import checked_source
from offloadd.control.clients.roles import Roles
from offloadd.control.clients.sessions import Session, Sessions
from offloadd.control.jobs.dispatcher import Dispatcher
from offloadd.control.jobs.endings import Endings
from offloadd.control.jobs.jobs import MAX_LISTED, Job, Owner
from offloadd.control.journal.frames import Frame
from offloadd.control.models.forecasting import Forecasts
from offloadd.control.models.models import ModelTable

Frames = Sequence[memoryview]
Result = msgspec.Struct | dict[str, Any]


class OnceWritten(msgspec.Struct, frozen=True):
    """A result that is told when the journal has written something, or the error that it met.

    `subscribe` takes the function to call then.
    """

    subscribe: Callable[[Callable[[OffloadError | None], None]], None]
    result: Callable[[], Result]


class Piece(msgspec.Struct, frozen=True):
    """An empty result with a frame behind it."""

    frame: Frame


Later = asyncio.Future[ModelInfo] | asyncio.Future[Forecast] | asyncio.Future[None]
Answer = Result | Piece | OnceWritten | Later
"""A result, or one that comes later."""


class Handlers:
    """One method a request; `stats` gives the statistics as a session may see them.

    `located` gives models with their bytes as they are now.
    """

    def __init__(
        self,
        sessions: Sessions,
        dispatcher: Dispatcher,
        models: ModelTable,
        endings: Endings,
        roles: Roles,
        clock: Callable[[], float],
        stats: Callable[[Session], dict[str, Any]],
        located: Callable[[list[ModelInfo]], list[ModelInfo]],
        forecasts: Forecasts,
        limits: Limits,
    ) -> None:
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._models = models
        self._endings = endings
        self._roles = roles
        self._clock = clock
        self._stats = stats
        self._located = located
        self._forecasts = forecasts
        self._limits = limits
        self._refusal: OffloadError | None = None
        self.is_draining = False
        self._handlers: dict[type[Request], Callable[[Session, Any, Frames], Answer | None]] = {
            Ping: self._ping,
            Submit: self._submit,
            Fetch: self._fetch,
            Read: self._read,
            Taken: self._taken,
            Cancel: self._cancel,
            Jobs: self._jobs,
            Stats: self._show_stats,
            Models: self._show_models,
            Load: self._load,
            Unload: self._unload,
            Pin: self._pin,
            Unpin: self._unpin,
            Plan: self._plan,
            Drain: self._drain,
        }

    def handle(self, session: Session, request: Request, frames: Frames) -> Answer | None:
        """The answer to a request, None where none is wanted.

        Raises the `OffloadError` that refuses it.
        """
        return self._handlers[type(request)](session, request, frames)

    def refuse_changes(self, error: OffloadError | None) -> None:
        """From now on, answer `load` and `unload` with this error, or, with None, do them again."""
        self._refusal = error

    def _ping(self, session: Session, request: Ping, frames: Frames) -> Result:
        return {}

    def _submit(self, session: Session, request: Submit, frames: Frames) -> Answer:
        owner = Owner(session.user, session.client, session.program)
        job = self._dispatcher.submit(owner, request, frames)
        return OnceWritten(job.when_written, lambda: self._attached(session, job))

    def _fetch(self, session: Session, request: Fetch, frames: Frames) -> Result:
        job = self._find(session, request.job)
        self._require_result(job)
        job.watchers.add(session.client)
        return self._attached(session, job)

    def _read(self, session: Session, request: Read, frames: Frames) -> Answer:
        job = self._find(session, request.job)
        if not job.is_final:
            raise InvalidRequest(
                f"the job {request.job!r} is {job.state} and has no result yet",
                hint="read it when `finished` has come",
            )
        self._require_result(job)
        return Piece(
            self._endings.results.piece(
                job.key, request.frame, request.offset, self._limits.max_piece_bytes
            )
        )

    def _taken(self, session: Session, request: Taken, frames: Frames) -> Answer | None:
        if request.quiet:
            known = self._dispatcher.table.find(session.user, request.job, administrates=False)
            if known is not None and known.is_final:
                self._endings.taken(known)
            return None
        job = self._find(session, request.job)
        if not job.is_final:
            return {}
        return OnceWritten(lambda told: self._endings.taken(job, told), dict)

    def _cancel(self, session: Session, request: Cancel, frames: Frames) -> Result:
        job = self._find(session, request.job)
        self._dispatcher.cancel(job)
        return self._info(session, job)

    def _jobs(self, session: Session, request: Jobs, frames: Frames) -> Result:
        sees_all = self._roles.administrates(session.connection.peer)
        seen = [job for job in self._dispatcher.table if sees_all or job.owner.user == session.user]
        return JobList(jobs=[self._info(session, job) for job in seen[-MAX_LISTED:]])

    def _show_stats(self, session: Session, request: Stats, frames: Frames) -> Result:
        return self._stats(session)

    def _show_models(self, session: Session, request: Models, frames: Frames) -> Result:
        return ModelList(models=self._located([model.info() for model in self._models]))

    def _load(self, session: Session, request: Load, frames: Frames) -> Answer:
        self._check_changes()
        if request.source is None:
            if request.options:
                raise InvalidRequest(
                    "options of a model go with its source",
                    hint=f"say where {request.name[:200]!r} is, or leave the options out",
                )
            return self._models.load(self._models.find(request.name))
        spec = _spec(request.name, request.source, request.options)
        self._require_for_files(session, spec, "loading a model from a path")
        return self._models.load(self._models.host(spec))

    def _unload(self, session: Session, request: Unload, frames: Frames) -> Answer:
        self._roles.require(session.connection.peer, "unloading a model")
        self._check_changes()
        model = self._models.find(request.name)
        is_used = self._dispatcher.table.uses(request.name)
        return self._models.unload(model, is_used, self._dispatcher.turns.uses(request.name))

    def _pin(self, session: Session, request: Pin, frames: Frames) -> Answer:
        self._roles.require(session.connection.peer, "pinning a model")
        self._check_changes()
        return self._models.pin(self._models.find(request.name))

    def _unpin(self, session: Session, request: Unpin, frames: Frames) -> Answer:
        self._roles.require(session.connection.peer, "unpinning a model")
        model = self._models.find(request.name)
        self._models.unpin(model)
        return model.info()

    def _plan(self, session: Session, request: Plan, frames: Frames) -> Answer:
        options = dict(request.options)
        if request.device_budget is not None:
            options["device_budget"] = request.device_budget
        hosted = self._models.get(request.source)
        source = request.source if hosted is None else "builtin:shapes"
        spec = _spec("plan", source, options)
        self._require_for_files(session, spec, "planning a model from a path")
        if hosted is not None:
            # As it is hosted, but for what is asked to be otherwise.
            changes = {key: getattr(spec, key) for key in options}
            changes |= {"name": spec.name, "source": hosted.spec.source}
            spec = msgspec.structs.replace(hosted.spec, **changes)
        return self._forecasts.ask(spec, request.host_budget)

    def _drain(self, session: Session, request: Drain, frames: Frames) -> Answer:
        self._roles.require(session.connection.peer, "draining the daemon")
        self.is_draining = True
        self._dispatcher.refuse(
            ShuttingDown(
                "the daemon takes no new jobs: an administrator drains it",
                hint="submit the job again when it has been restarted",
            )
        )
        return self._endings.all_ended()

    def _require_for_files(self, session: Session, spec: ModelSpec, what: str) -> None:
        """Only administrators name files: promise 7."""
        if spec.names_files:
            self._roles.require(session.connection.peer, what)

    def _check_changes(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _attached(self, session: Session, job: Job) -> JobInfo:
        # An end that is still being written is told by that.
        if job.is_final and job.end_is_written:
            # After the answer, so that the client knows the job when its end arrives.
            asyncio.get_running_loop().call_soon(
                self._sessions.push_finished, session.client, job.key
            )
        return self._info(session, job)

    def _find(self, session: Session, name: str) -> Job:
        administrates = self._roles.administrates(session.connection.peer)
        job = self._dispatcher.table.find(session.user, name, administrates)
        if job is None:
            raise UnknownJob(
                f"no job {name[:200]!r} of yours is known",
                hint="jobs are forgotten some time after their end",
            )
        return job

    def _require_result(self, job: Job) -> None:
        if job.is_final and not self._endings.has_result(job):
            raise UnknownJob(
                f"the job {job.request.job!r} has ended and its result was taken",
                hint="a result is given until it is taken; to draw it again, make a new id",
            )

    def _info(self, session: Session, job: Job) -> JobInfo:
        return job.info(self._clock(), session.user)


def _spec(name: str, source: str, options: dict[str, Any]) -> ModelSpec:
    unknown = [key for key in options if key not in ModelSpec.__struct_fields__]
    if unknown:
        near = difflib.get_close_matches(unknown[0], ModelSpec.__struct_fields__, n=1)
        raise InvalidRequest(
            f"a model has no option {unknown[0][:80]!r}",
            hint=f"did you mean {near[0]!r}?" if near else "see the keys of [[models]]",
        )
    return model_spec(name, checked_source(source, f"model {name[:200]!r}"), options)
