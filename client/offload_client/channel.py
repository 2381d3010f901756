"""The only ZeroMQ socket of a client: moves frames between a session and the wire, never blocking.

The monitor of the socket tells the session of connections made, refused and lost, which ZeroMQ
would hide. Over tcp, CURVE encrypts all that is said and proves each end to the other.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any

import zmq

from offload_client.session import Session
from offload_protocol.errors import Unauthorized
from offload_protocol.keys import ClientKeys
from offload_protocol.limits import DEFAULT_LIMITS

HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
"""A daemon that is stopped, or a network that is cut, is noticed after these two together."""
PEER_TTL_MS = 10_000
LINGER_MS = 200
"""How long a closed channel may still push out its last words, such as a cancel."""
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1_000
HANDSHAKE_MS = 5_000
ZERO_COPY_BYTES = 1 << 16

_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES
_names = itertools.count()

# Asked for before each receive: an attempt that fails costs ten times as much, and so do pyzmq's
# own constants, which make an enumeration's member of each answer.
_PENDING, _READABLE, _WRITABLE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
_MORE, _NOBLOCK = int(zmq.RCVMORE), int(zmq.NOBLOCK)


class Channel:
    """A DEALER socket and its monitor, tied to one session. One thread at a time may use it."""

    def __init__(self, endpoint: str, session: Session, keys: ClientKeys | None = None) -> None:
        """`keys` are needed for tcp alone."""
        self.suspicion: str | None = None
        """What may be wrong with a connection that the other end breaks off without a word."""
        self._session = session
        self._is_torn = False
        context = zmq.Context.instance()
        self._socket: Any = context.socket(zmq.DEALER)
        self._monitor: Any = context.socket(zmq.PAIR)
        try:
            self._configure(endpoint, keys)
        except BaseException:
            self.close()
            raise

    def _configure(self, endpoint: str, keys: ClientKeys | None) -> None:
        options = {
            # Messages wait in our outbox until there is a connection: after a loss the session
            # decides what is said again, and nothing old is sent to a new daemon.
            zmq.IMMEDIATE: 1,
            zmq.LINGER: LINGER_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_INTERVAL_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            zmq.HEARTBEAT_TTL: PEER_TTL_MS,
            zmq.MAXMSGSIZE: DEFAULT_LIMITS.max_message_bytes,
            zmq.IPV6: 1,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        # ZeroMQ's own thread would block on a full monitor, so it has no limit.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.setsockopt(zmq.LINGER, 0)
        address = f"inproc://offload-client-{next(_names)}"
        self._socket.monitor(address, _EVENTS)
        self._monitor.connect(address)
        self._socket.connect(endpoint)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors that become readable, edge-triggered, when `pump` may have work."""
        return int(self._socket.fileno()), int(self._monitor.fileno())

    def pump(self, now: float) -> bool:
        """Move all that can move now; returns whether anything arrived.

        Using a ZeroMQ socket takes its edge-triggered signal away, so whatever was tried with it,
        the last thing is to look whether something has come. And not more often: a look costs more
        than a microsecond, and a small job is to cost a client few of them.
        """
        arrived = self._hear_of_connections(now)
        session = self._session
        while True:
            session.tick(now)
            wants_to_send = bool(session.outbox) and session.connected
            has_sent = wants_to_send and self._send_all()
            arrived |= self._receive_all(now)
            if not (session.outbox and session.connected) or (wants_to_send and not has_sent):
                return arrived

    def push(self) -> None:
        """Send what can be sent now, for one who polls afterwards, which finds what has come."""
        if self._session.connected:
            self._send_all()

    def poll(self, wake_fd: int, timeout_s: float | None) -> bool:
        """Block until `pump` may have work, `wake_fd` is readable, or the time is over.

        Returns whether `wake_fd` is.
        """
        wanted = _READABLE | (_WRITABLE if self._session.outbox else 0)
        timeout_ms = -1 if timeout_s is None else max(0, int(timeout_s * 1000) + 1)
        ready = zmq.zmq_poll(
            [(self._socket, wanted), (self._monitor, _READABLE), (wake_fd, _READABLE)], timeout_ms
        )
        return any(which == wake_fd for which, _ in ready)

    def close(self) -> None:
        """Give the sockets back; what was sent has `LINGER_MS` to leave."""
        self._socket.monitor(None, 0)
        self._monitor.close()
        self._socket.close()

    def _hear_of_connections(self, now: float) -> bool:
        heard = False
        while self._monitor.getsockopt(_PENDING) & _READABLE:
            event, _ = self._monitor.recv_multipart(_NOBLOCK)
            heard = True
            number, value = struct.unpack("=HI", event)
            if number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._session.connection_made(now)
            elif number == zmq.EVENT_DISCONNECTED:
                self._session.connection_lost(now)
            else:
                self._failed_handshake(number, value)
        return heard

    def _failed_handshake(self, number: int, value: int) -> None:
        if number == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._session.turned_away(
                Unauthorized(
                    "the daemon does not know this client's key",
                    hint="give the public half to whoever runs the daemon: the file ending in .pub",
                    details={"status": value},
                )
            )
        elif number == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.suspicion = "what listens there does not speak CURVE as the daemon does"
        else:
            self.suspicion = (
                "the connection was broken off in the handshake: it may be another daemon than the "
                "one whose public key this client has"
            )

    def _receive_all(self, now: float) -> bool:
        received = False
        if self._is_torn:
            # An interrupt has struck between two parts; the rest of that message is useless.
            while self._socket.getsockopt(_MORE):
                self._socket.recv(_NOBLOCK)
            self._is_torn = False
        while self._socket.getsockopt(_PENDING) & _READABLE:
            received = self._is_torn = True
            frame = self._socket.recv(_NOBLOCK, copy=False)
            frames = [frame.buffer]
            while frame.more:
                frame = self._socket.recv(_NOBLOCK, copy=False)
                frames.append(frame.buffer)
            self._is_torn = False
            self._session.receive(frames, now)
        return received

    def _send_all(self) -> bool:
        sent = False
        outbox = self._session.outbox
        while outbox and self._session.connected:
            try:
                if len(outbox[0]) == 1:
                    self._socket.send(outbox[0][0], _NOBLOCK)
                else:
                    self._socket.send_multipart(outbox[0], _NOBLOCK, copy=_is_small(outbox[0]))
            except zmq.Again:
                return sent
            outbox.popleft()
            sent = True
        return sent


def _is_small(frames: list[Any]) -> bool:
    return sum(len(frame) for frame in frames) < ZERO_COPY_BYTES
