"""The front of the daemon: from bytes to an answer, for every message of every client.

It promises that whatever a client sends, it gets an answer or is counted, and the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from offload_protocol import codec
from offload_protocol.errors import InternalError, OffloadError, ProtocolMismatch
from offload_protocol.limits import Limits
from offload_protocol.messages import PROTOCOL_VERSION, Answer, Error, Hello, Reply
from offload_protocol.records import Welcome
from offloadd.control.clients.handlers import Answer as Handled
from offloadd.control.clients.handlers import Handlers, Later, OnceWritten, Piece, Result
from offloadd.control.clients.leases import Leases
from offloadd.control.clients.roles import Roles
from offloadd.control.clients.router import Connection
from offloadd.control.clients.sessions import Sessions

_log = logging.getLogger(__name__)


class _Reply(Answer, frozen=True, tag="reply"):
    """A `Reply` whose result need not be made plain before it is encoded."""

    rid: int
    result: Any = msgspec.field(default_factory=dict)


class Books(Protocol):
    """Where what comes together is written down together."""

    def gather(self) -> None:
        """Wait for more."""

    def commit(self) -> None:
        """No more comes."""


class Front:
    """The `Receiver` of the routers. `leases` is told who comes and goes."""

    def __init__(
        self,
        sessions: Sessions,
        handlers: Handlers,
        limits: Limits,
        daemon_version: str,
        instance: str,
        clock: Callable[[], float],
        leases: Leases,
        roles: Roles,
        books: Books,
    ) -> None:
        self.protocol_errors_total = 0
        self._sessions = sessions
        self._handlers = handlers
        self._limits = limits
        self._daemon_version = daemon_version
        self._instance = instance
        self._clock = clock
        self._leases = leases
        self._roles = roles
        self._books = books

    def on_batch(self) -> None:
        """Several messages may come, and are then written down together."""
        self._books.gather()

    def on_message(self, connection: Connection, frames: list[memoryview]) -> None:
        """Answer a message."""
        rid: int | None = None
        try:
            request = codec.decode_request(frames[0], self._limits)
            rid = request.rid
            codec.check_frames(frames[1:], self._limits)
            if isinstance(request, Hello):
                answer: Handled | None = self._welcome(connection, request)
            else:
                answer = self._handlers.handle(self._sessions.of(connection), request, frames[1:])
        except codec.UnreadableRequest as error:
            self._refuse(connection, error.rid, error)
        except OffloadError as error:
            self._refuse(connection, rid, error)
        except Exception:  # noqa: BLE001 - the last resort: our fault costs one request, no more
            self._refuse_as_our_fault(connection, rid)
        else:
            if isinstance(answer, OnceWritten):
                settle = partial(self._answer_written, connection, request.rid, answer.result)
                answer.subscribe(settle)
            elif isinstance(answer, asyncio.Future):
                answer.add_done_callback(partial(self._answer_later, connection, request.rid))
            elif isinstance(answer, Piece):
                reply = Reply(rid=request.rid, result={})
                self._sessions.answer(connection, reply, answer.frame)
            elif answer is not None:
                self._reply(connection, request.rid, answer)

    def on_disconnected(self, connection: Connection) -> None:
        """A client's connection has ended."""
        session = self._sessions.leave(connection)
        if session is not None:
            self._leases.left(session.client, self._clock())

    def part_from_banned(self) -> None:
        """Treat those whose key was removed as gone: nothing more is pushed to them."""
        for connection in self._sessions.of_peers(self._roles.is_banned):
            self.on_disconnected(connection)

    def on_batch_end(self) -> None:
        """These were all; besides, some client may have read."""
        self._books.commit()
        self._sessions.retry_blocked()

    def on_anonymous(self) -> None:
        """A message without credentials was dropped."""
        self.protocol_errors_total += 1

    def _welcome(self, connection: Connection, hello: Hello) -> Welcome:
        self._roles.require_allowed(connection.peer)
        session = self._sessions.introduce(connection, hello, self._clock())
        self._leases.came(session.client)
        return Welcome(
            version=PROTOCOL_VERSION,
            daemon_version=self._daemon_version,
            instance=self._instance,
            limits=self._limits,
        )

    def _reply(self, connection: Connection, rid: int, result: Result) -> None:
        try:
            self._sessions.answer(connection, _Reply(rid=rid, result=result))
        except OffloadError:
            # Some text or number of the result fits no message. A client would wait for ever.
            self._refuse_as_our_fault(connection, rid)

    def _refuse(self, connection: Connection, rid: int | None, error: OffloadError) -> None:
        if isinstance(error, (codec.UnreadableRequest, ProtocolMismatch)) or rid is None:
            self.protocol_errors_total += 1
        self._sessions.answer(connection, Error(rid=rid, error=codec.error_info(error)))

    def _refuse_as_our_fault(self, connection: Connection, rid: int | None) -> None:
        """Write down the exception that is being handled, and answer that there was one."""
        _log.exception("a request could not be handled")
        self._refuse(connection, rid, InternalError("a fault in offloadd; see its log"))

    def _answer_later(
        self,
        connection: Connection,
        rid: int,
        answer: Later,
    ) -> None:
        if answer.cancelled():
            return  # the daemon ends
        try:
            result: Result = answer.result() or {}
        except OffloadError as error:
            self._refuse(connection, rid, error)
        except Exception:  # noqa: BLE001 - the last resort, as in `on_message`
            self._refuse_as_our_fault(connection, rid)
        else:
            self._reply(connection, rid, result)

    def _answer_written(
        self,
        connection: Connection,
        rid: int,
        result: Callable[[], Result],
        error: OffloadError | None,
    ) -> None:
        if error is not None:
            self._refuse(connection, rid, error)
        else:
            self._reply(connection, rid, result())
