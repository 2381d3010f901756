"""Who is connected: each client's introduction, its connection, and what is on its way to it.

A client is named by its user (a uid or a key) and the random session it chose, so that it is the
same one after a reconnect; the latest connection that names it gets what is pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from offload_protocol import codec
from offload_protocol.errors import InvalidRequest, ProtocolMismatch
from offload_protocol.messages import PROTOCOL_VERSION, Answer, Hello, Progress
from offloadd.control.clients.outbox import Outbox, Outcome, Waiting
from offloadd.control.clients.peers import Peer
from offloadd.control.clients.router import Buffer, Connection, Sent

MAX_SESSION_CHARS = 100
MAX_PROGRAM_CHARS = 100


class Session:
    """One introduced connection."""

    def __init__(self, connection: Connection, hello: Hello, connected_s: float) -> None:
        self.connection = connection
        self.client = f"{connection.peer.user}:{hello.session}"
        self.program = hello.program
        self.client_version = hello.client_version
        self.connected_s = connected_s
        self.outbox = Outbox()

    @property
    def user(self) -> str:
        """Who is at the other end, as jobs are owned."""
        return self.connection.peer.user


class Sessions:
    """All introduced connections, and the way to them.

    `find_result` gives what is sent of the end of a job.
    """

    def __init__(self, find_result: Callable[[str], tuple[Buffer, ...] | None]) -> None:
        self._find_result = find_result
        self._by_connection: dict[Connection, Session] = {}
        self._by_client: dict[str, Session] = {}
        self._blocked: set[Session] = set()
        self.dropped_total = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_connection.values())

    def __len__(self) -> int:
        return len(self._by_connection)

    def introduce(self, connection: Connection, hello: Hello, now_s: float) -> Session:
        """Enter a client; raises `ProtocolMismatch` for another version than ours."""
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"the client speaks version {hello.version} of the protocol, the daemon version "
                f"{PROTOCOL_VERSION}",
                hint="install the same offloadd for both, and restart the daemon after an upgrade",
                details={"client": hello.version, "daemon": PROTOCOL_VERSION},
            )
        if not 1 <= len(hello.session) <= MAX_SESSION_CHARS or not hello.session.isprintable():
            raise InvalidRequest(
                "the hello's session is empty, too long or not printable",
                hint=f"make 1 to {MAX_SESSION_CHARS} random characters",
            )
        program, version = _for_people(hello.program), _for_people(hello.client_version)
        self.leave(connection)
        hello = msgspec.structs.replace(hello, program=program, client_version=version)
        session = Session(connection, hello, now_s)
        self._by_connection[connection] = session
        self._by_client[session.client] = session
        return session

    def of(self, connection: Connection) -> Session:
        """The session of a connection; raises `ProtocolMismatch` before its hello."""
        session = self._by_connection.get(connection)
        if session is None:
            raise ProtocolMismatch(
                "the first message of a connection has to be a hello",
                hint="say hello again after a reconnect",
                details={"hello_required": True},
            )
        return session

    def leave(self, connection: Connection) -> Session | None:
        """The connection has ended; gives its session if no other one has taken its place."""
        session = self._by_connection.pop(connection, None)
        if session is None:
            return None
        self._blocked.discard(session)
        if self._by_client.get(session.client) is not session:
            return None
        del self._by_client[session.client]
        return session

    def of_peers(self, are_meant: Callable[[Peer], bool]) -> list[Connection]:
        """The introduced connections of some peers."""
        return [connection for connection in self._by_connection if are_meant(connection.peer)]

    def answer(self, connection: Connection, message: Answer, *frames: Buffer) -> None:
        """Send the answer to a request, now or when the client has read what came before."""
        parts = (codec.encode(message), *frames)
        session = self._by_connection.get(connection)
        if session is None:
            connection.send(parts)
        elif not self._sends_now(session, parts):
            self._count(session.outbox.add_reply(parts))

    def push_progress(self, client: str, key: str, progress: Progress) -> None:
        """Tell a client how far a job is, if it is there and reads."""
        session = self._by_client.get(client)
        if session is not None:
            body = codec.encode(progress)
            if not self._sends_now(session, (body,)):
                self._count(session.outbox.add_progress(key, body))

    def push_preview(self, client: str, progress: Progress, frames: Sequence[Buffer]) -> bool:
        """Show a client a picture now; False where it does not read, or is not there."""
        session = self._by_client.get(client)
        if session is None or session.outbox:
            return False
        if session.connection.send((codec.encode(progress), *frames)) is Sent.SENT:
            return True
        self.dropped_total += 1
        return False

    def push_finished(self, client: str, key: str) -> None:
        """Tell a client how a job ended, now or when it reads again."""
        session = self._by_client.get(client)
        result = self._find_result(key)
        if session is not None and result is not None:
            if self._sends_now(session, result):
                session.outbox.forget(key)
            else:
                session.outbox.add_finished(key)

    def retry_blocked(self) -> None:
        """Some client has read: try again what waits."""
        for session in tuple(self._blocked):
            session.outbox.flush(partial(self._goes_out, session))
            if not session.outbox:
                self._blocked.discard(session)

    def _sends_now(self, session: Session, parts: tuple[Buffer, ...]) -> bool:
        if not session.outbox and session.connection.send(parts) is not Sent.BLOCKED:
            return True
        self._blocked.add(session)
        return False

    def _goes_out(self, session: Session, waiting: Waiting) -> bool:
        if waiting.parts:
            parts: tuple[Buffer, ...] = waiting.parts
        else:
            result = self._find_result(waiting.finished or "")
            if result is None:
                return True
            parts = result
        return session.connection.send(parts) is not Sent.BLOCKED

    def _count(self, outcome: Outcome) -> None:
        if outcome is Outcome.DROPPED:
            self.dropped_total += 1


def _for_people(text: str) -> str:
    # Other users see it at their terminals, which take some characters for commands.
    return "".join(char for char in text[:MAX_PROGRAM_CHARS] if char.isprintable())
