"""What `AsyncClient` waits with: the socket as a guest of the running event loop.

No task runs in the background and nothing is received in a coroutine, so a cancelled caller can
lose no message: the loop calls `_move` when the socket has something, and that never blocks.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from offload_client.aio_job import AsyncJob
from offload_client.core import QUICK_TIMEOUT_S, Core, Life, Settings, submission
from offload_client.records import Call, JobRecord, Watched
from offload_client.results import Result, result_of
from offload_client.waiting import ConnectionMissing, Wait
from offload_protocol import messages
from offload_protocol.codec import convert
from offload_protocol.errors import InvalidRequest, OffloadError
from offload_protocol.messages import Request
from offload_protocol.records import JobInfo, JobState


class Looping:
    """Life cycle and waits of a client on an event loop."""

    def __init__(self, settings: Settings) -> None:
        self._core = Core(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._known: weakref.WeakValueDictionary[str, JobRecord] = weakref.WeakValueDictionary()

    @property
    def closed(self) -> bool:
        """Whether `close` was called; a closed client stays closed."""
        return self._core.life is Life.CLOSED

    @property
    def endpoint(self) -> str:
        """Where the daemon is, or would be looked for now."""
        return (self._core.choice or self._core.choose()).endpoint

    async def connect(self) -> None:
        """Open the connection if it is not open; every other call does so by itself.

        Raises `Unreachable` within `connect_timeout_s` where no daemon answers, and
        `ProtocolMismatch` where it speaks another version.
        """
        self._core.check_usable()
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise InvalidRequest(
                "this client belongs to another event loop", hint="make one AsyncClient in each"
            )
        if self._core.life is Life.OPEN:
            return
        async with self._opening:
            self._core.check_usable()
            if self._core.life is Life.UNOPENED:
                await self._open()

    async def close(self) -> None:
        """Close the connection; the daemon then cancels this client's jobs, unless `detached`.

        May be called twice.
        """
        if self._core.life is not Life.CLOSED:
            self._core.life = Life.CLOSED
            self._detach()

    async def _open(self) -> None:
        core = self._core
        choice = core.choose()
        # Looking up and trying a tcp host may block.
        await asyncio.to_thread(core.probe, choice)
        core.open(choice)
        self._loop = asyncio.get_running_loop()
        for descriptor in core.channel.descriptors:
            self._loop.add_reader(descriptor, self._move)
        try:
            self._move()
            await self._wait(core.session, lambda: core.session.ready, core.wait("hello", None))
        except BaseException:
            self._detach()
            raise
        core.life = Life.OPEN

    def _detach(self) -> None:
        session, inherited = self._core.peek(), self._core.is_inherited
        if session is not None and not inherited and self._loop is not None:
            for descriptor in self._core.channel.descriptors:
                self._loop.remove_reader(descriptor)
        if self._timer is not None:
            self._timer.cancel()
        self._core.shut()
        self._loop = None
        if session is not None and not inherited:
            # Whoever still waits wakes up and finds the client closed.
            for watched in (session, *session.jobs.values()):
                watched.changed()

    def _move(self) -> None:
        """Move all that can move now, and come back when the session has something due."""
        session = self._core.peek()
        if session is None:
            return
        self._core.channel.pump(time.monotonic())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = session.next_due()
        if due is not None and self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._move)

    async def _wait(self, watched: Watched, is_ready: Callable[[], bool], wait: Wait) -> None:
        """Return when `is_ready`; raises what `Wait.check` says, or `Unreachable`."""
        while not is_ready():
            self._core.check_usable()
            session, now = self._core.session, time.monotonic()
            try:
                wait.check(session, now)
            except ConnectionMissing as missing:
                raise await asyncio.to_thread(self._core.missing, missing) from None
            next_check = wait.next_check(session)
            await self._woken((watched, session), None if next_check is None else next_check - now)

    async def _woken(self, all_watched: tuple[Watched, ...], timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        timer = None if timeout_s is None else loop.call_later(max(0.0, timeout_s), wake)
        for watched in all_watched:
            watched.watchers.add(wake)
        try:
            await woken
        finally:
            for watched in all_watched:
                watched.watchers.discard(wake)
            if timer is not None:
                timer.cancel()

    async def _begin(self, what: str, limit_s: float | None) -> Wait:
        """Start a call: with a connection, and knowing of its loss if it was lost unnoticed."""
        since = time.monotonic()
        await self.connect()
        self._move()
        return self._core.wait(what, limit_s, since=since)

    async def _ask(
        self,
        kind: type[Request],
        timeout_s: float | None,
        otherwise_s: float | None,
        **fields: Any,
    ) -> dict[str, Any]:
        what = f"the answer to {kind.__name__.lower()}"
        wait = await self._begin(what, self._core.limit_s(timeout_s, otherwise_s))
        call = self._core.ask(kind, wait, **fields)
        self._move()
        return await self._answer(call, wait)

    async def _answer(self, call: Call, wait: Wait) -> dict[str, Any]:
        try:
            await self._wait(call, lambda: call.done, wait)
        finally:
            if not call.done:
                self._core.abandon(call)
        return call.answer()

    async def _submit(
        self,
        wait: Wait,
        model: str,
        prompt: str | list[str] | None,
        arguments: Mapping[str, Any],
        **options: Any,
    ) -> AsyncJob:
        limits = self._core.session.limits
        submit, frames = submission(model, prompt, arguments, limits, **options)
        record, call = self._core.submit(submit, frames, wait)
        with self._cancelling(record):
            self._move()
            await self._wait(call, lambda: call.done, wait)
        call.answer()
        self._known[record.id] = record
        return AsyncJob(self, record)

    async def _find(self, job_id: str, timeout_s: float | None) -> AsyncJob:
        limit_s = self._core.limit_s(timeout_s, QUICK_TIMEOUT_S)
        wait = await self._begin("the answer to fetch", limit_s)
        record = self._core.session.jobs.get(job_id) or self._known.get(job_id)
        if record is None:
            record, call = self._core.follow(job_id)
            self._move()
            await self._answer(call, wait)
            self._known[job_id] = record
        return AsyncJob(self, record)

    async def _events(
        self, record: JobRecord, seen: int, wait: Wait
    ) -> tuple[list[messages.Progress], int]:
        await self._wait(record, lambda: record.ended or record.events_total > seen, wait)
        return record.events_after(seen)

    async def _result(self, record: JobRecord, timeout_s: float | None) -> Result:
        what = f"the result of job {record.id}"
        wait = self._core.wait(what, self._core.limit_s(timeout_s), job_known=True)
        await self._wait(record, lambda: record.ended, wait)
        return self._hand_over(record)

    def _hand_over(self, record: JobRecord) -> Result:
        if isinstance(record.result, Result):
            return record.result
        try:
            record.result = result_of(record)
        finally:
            # A failure is taken as well: the program has been told, and will not ask again.
            with suppress(OffloadError):
                self._core.take(record)
                self._move()
        return record.result

    async def _cancel(self, record: JobRecord) -> JobState:
        if not record.ended:
            result = await self._ask(messages.Cancel, None, QUICK_TIMEOUT_S, job=record.id)
            return convert(result, JobInfo).state
        return record.state

    @contextmanager
    def _cancelling(self, record: JobRecord) -> Iterator[None]:
        """Cancel the job where the block is left by an exception before the job ended.

        Nothing is awaited, since a cancelled task should end at once.
        """
        try:
            yield
        except BaseException:
            if not record.ended and not self.closed:
                wait = self._core.wait("the answer to cancel", None)
                with suppress(OffloadError):
                    self._core.session.forget(record)
                    self._core.ask(messages.Cancel, wait, job=record.id)
                    self._move()
            raise
