"""What `Client` waits with: opening, closing, and each call from its request to its answer.

Every wait may end by an exception; whatever was begun is then abandoned, and a job that nobody can
come back to is cancelled.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from offload_client.core import CANCEL_TIMEOUT_S, QUICK_TIMEOUT_S, Core, Life, Settings, submission
from offload_client.job import Job
from offload_client.pump import Pump
from offload_client.records import Call, JobRecord
from offload_client.results import Result, result_of
from offload_client.waiting import Wait
from offload_protocol import messages
from offload_protocol.codec import convert
from offload_protocol.errors import OffloadError, TimedOut, Unreachable
from offload_protocol.messages import Request
from offload_protocol.records import JobInfo, JobState

FRESH_S = 0.1
"""Who has heard or said something so recently need not look whether the connection stands."""


class Blocking:
    """Life cycle and waits of a client without an event loop."""

    def __init__(self, settings: Settings) -> None:
        self._core = Core(settings)
        self._pump = Pump(self._core)
        self._known: weakref.WeakValueDictionary[str, JobRecord] = weakref.WeakValueDictionary()

    @property
    def closed(self) -> bool:
        """Whether `close` was called; a closed client stays closed."""
        return self._core.life is Life.CLOSED

    @property
    def endpoint(self) -> str:
        """Where the daemon is, or would be looked for now."""
        return (self._core.choice or self._core.choose()).endpoint

    def connect(self) -> None:
        """Open the connection if it is not open; every other call does so by itself.

        Raises `Unreachable` within `connect_timeout_s` where no daemon answers, and
        `ProtocolMismatch` where it speaks another version.
        """
        self._core.check_usable()
        if self._core.life is Life.OPEN:
            return
        # The lock stays held meanwhile: threads that come now wait for this opening.
        with self._pump.lock:
            self._core.check_usable()
            if self._core.life is Life.UNOPENED:
                self._open()

    def close(self) -> None:
        """Close the connection; the daemon then cancels this client's jobs, unless `detached`.

        May be called twice.
        """
        if self._core.is_inherited:
            self._core.life = Life.CLOSED
            return
        with self._pump.lock:
            if self._core.life is Life.CLOSED:
                return
            self._core.life = Life.CLOSED
            self._pump.stop()
            self._core.shut()
            self._pump.close()

    def _open(self) -> None:
        core = self._core
        choice = core.choose()
        core.probe(choice)
        core.open(choice)
        self._pump.open()
        wait = core.wait("the greeting", None)
        try:
            self._pump.wait(lambda: core.session.ready, wait)
        except BaseException:
            core.shut()
            self._pump.close()
            raise
        core.life = Life.OPEN

    def _begin(self, what: str, limit_s: float | None) -> Wait:
        """Start a call: with a connection, and knowing of its loss if it was lost while idle."""
        since = time.monotonic()
        self.connect()
        if since - self._core.session.active_at > FRESH_S:
            self._hear()
        return self._core.wait(what, limit_s, since=since)

    def _ask(
        self,
        kind: type[Request],
        timeout_s: float | None,
        otherwise_s: float | None,
        **fields: Any,
    ) -> dict[str, Any]:
        what = f"the answer to {kind.__name__.lower()}"
        wait = self._begin(what, self._core.limit_s(timeout_s, otherwise_s))
        with self._pump.locked():
            call = self._core.ask(kind, wait, **fields)
        return self._answer(call, wait)

    def _answer(self, call: Call, wait: Wait) -> dict[str, Any]:
        try:
            self._pump.wait(lambda: call.done, wait)
        finally:
            if not call.done:
                self._core.abandon(call)
        return call.answer()

    def _submit(
        self,
        wait: Wait,
        model: str,
        prompt: str | list[str] | None,
        arguments: Mapping[str, Any],
        **options: Any,
    ) -> Job:
        record, call = self._say(wait, model, prompt, arguments, **options)
        with self._cancelling(record):
            self._pump.wait(lambda: call.done, wait)
        call.answer()
        self._known[record.id] = record
        return Job(self, record)

    def _say(
        self,
        wait: Wait,
        model: str,
        prompt: str | list[str] | None,
        arguments: Mapping[str, Any],
        **options: Any,
    ) -> tuple[JobRecord, Call]:
        limits = self._core.session.limits
        submit, frames = submission(model, prompt, arguments, limits, **options)
        with self._pump.locked(listens=False):
            return self._core.submit(submit, frames, wait)

    def _find(self, job_id: str, timeout_s: float | None) -> Job:
        wait = self._begin("the answer to fetch", self._core.limit_s(timeout_s, QUICK_TIMEOUT_S))
        with self._pump.locked():
            record = self._core.session.jobs.get(job_id) or self._known.get(job_id)
            if record is not None:
                return Job(self, record)
            record, call = self._core.follow(job_id)
        self._answer(call, wait)
        self._known[job_id] = record
        return Job(self, record)

    def _hear(self) -> None:
        with self._pump.locked():
            pass

    def _events(
        self, record: JobRecord, seen: int, wait: Wait
    ) -> tuple[list[messages.Progress], int]:
        self._pump.wait(lambda: record.ended or record.events_total > seen, wait)
        with self._pump.lock:
            return record.events_after(seen)

    def _result(self, record: JobRecord, timeout_s: float | None) -> Result:
        what = f"the result of job {record.id}"
        wait = self._core.wait(what, self._core.limit_s(timeout_s), job_known=True)
        self._pump.wait(lambda: record.ended, wait)
        return self._hand_over(record)

    def _hand_over(self, record: JobRecord) -> Result:
        if isinstance(record.result, Result):
            return record.result
        try:
            record.result = result_of(record)
        finally:
            # A failure is taken as well: the program has been told, and will not ask again.
            with suppress(OffloadError), self._pump.locked(listens=False):
                self._core.take(record)
        return record.result

    def _cancel(self, record: JobRecord) -> JobState:
        if not record.ended:
            result = self._ask(messages.Cancel, None, QUICK_TIMEOUT_S, job=record.id)
            return convert(result, JobInfo).state
        return record.state

    @contextmanager
    def _cancelling(self, record: JobRecord) -> Iterator[None]:
        """Cancel the job where the block is left by an exception before the job ended."""
        try:
            yield
        except BaseException as error:
            if not record.ended and not self.closed:
                self._give_up(record, patiently=not isinstance(error, (TimedOut, Unreachable)))
            raise

    def _give_up(self, record: JobRecord, *, patiently: bool) -> None:
        """Say cancel, and wait for the answer where there is hope for one."""
        wait = Wait("the answer to cancel", time.monotonic(), CANCEL_TIMEOUT_S, CANCEL_TIMEOUT_S)
        with suppress(OffloadError):
            with self._pump.locked():
                self._core.session.forget(record)
                call = self._core.ask(messages.Cancel, wait, job=record.id)
            if patiently:
                self._pump.wait(lambda: call.done, wait)
