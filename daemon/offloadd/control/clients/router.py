"""A ROUTER socket on the event loop: with `curve`, all that knows ZeroMQ.

It promises that `send` never blocks and says what became of a message, that every connection has
the credentials which the kernel gives for it, and that its end is reported once.

Invariants:
- The socket's descriptor is edge-triggered: whoever receives or sends looks at EVENTS afterwards
  and goes on while something is there, or an edge is lost and a client waits for ever.
- A batch is bounded, so that a flood of messages cannot keep the loop from its other work.
- A peer's last messages are handled before its end is reported, since `taken` may be among them.
- A daemon that serves two endpoints has two of these; a connection knows its own.
- Descriptors are used again, connection ids are not. The monitor's news are read before a new
  connection is entered, so an old connection's end never hits its successor.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import zmq

from offload_protocol.limits import Limits
from offloadd.control.clients.curve import Curve
from offloadd.control.clients.listener import Listener
from offloadd.control.clients.peers import Peer, local_peer

BATCH_MESSAGES = 64
"""Received before the loop is let go for its other work."""

SEND_HIGH_WATER_MESSAGES = 64
"""Messages that ZeroMQ holds for one client; large frames among them are shared, not copied."""

RECEIVE_HIGH_WATER_MESSAGES = 64

HEARTBEAT_INTERVAL_MS = 2_000
LEAST_HEARTBEAT_TIMEOUT_MS = 3_000
"""A peer whose machine or process stands still is dropped; the io thread answers, so a client that
is busy in its own code stays."""

FAREWELL_MS = 1_000
"""How long closing waits for the last messages to leave."""

Buffer = bytes | bytearray | memoryview

SHARED_BYTES = 1 << 16
"""Frames from this size on are shared with ZeroMQ; for smaller ones a copy costs less."""

# Plain numbers: pyzmq's own make an enumeration's member of each answer, for which a job asks ten
# times.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_DONTWAIT, _SNDMORE = int(zmq.DONTWAIT), int(zmq.SNDMORE)

_MONITOR_EVENT = struct.Struct("=hi")


class Sent(Enum):
    """What became of a message."""

    SENT = auto()
    BLOCKED = auto()
    """The client reads too slowly; try again when `on_batch_end` is called."""
    GONE = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """One client connection; `identity` is chosen by the socket and never used twice."""

    identity: bytes
    peer: Peer
    router: Router

    def send(self, parts: Sequence[Buffer]) -> Sent:
        """Send a message whole or not at all, without waiting."""
        return self.router.send(self.identity, parts)


class Receiver(Protocol):
    """Who is told what arrives."""

    def on_batch(self) -> None:
        """Messages may come, one right behind the other."""

    def on_message(self, connection: Connection, frames: list[memoryview]) -> None:
        """A message; the list holds one frame more than allowed if there were too many."""

    def on_disconnected(self, connection: Connection) -> None:
        """The connection has ended; nothing more comes from it."""

    def on_batch_end(self) -> None:
        """No more messages for now. Some client may have read; blocked ones may be tried again."""

    def on_anonymous(self) -> None:
        """A message came over a connection whose credentials are not known, and was dropped."""


class Router:
    """Binds the listener's endpoint; from `start` on, it hands what arrives to a receiver."""

    _receiver: Receiver

    def __init__(
        self, listener: Listener, limits: Limits, silence_s: float, curve: Curve | None = None
    ) -> None:
        """`silence_s` is how long a peer may say nothing at all before it is dropped.

        With `curve`, peers are the holders of its keys, else processes of this machine.
        """
        self._max_frames = limits.max_frames + 2
        self._connections: dict[bytes, Connection] = {}
        self._identities: dict[int, bytes] = {}
        self._closed_descriptors: set[int] = set()
        self._drain_is_due = False
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, limits, silence_s)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._peer_of = local_peer if curve is None else curve.peer
        self._end_curve = curve.secure(self._socket) if curve is not None else None
        # libzmq closes the descriptor itself; closing it twice would abort the process.
        self._socket.setsockopt(zmq.USE_FD, listener.socket.detach())
        self._socket.bind(listener.endpoint)

    def start(self, receiver: Receiver) -> None:
        """Begin to receive."""
        self._receiver = receiver
        self._loop.add_reader(self._socket.get(zmq.FD), self._drain)
        self._loop.add_reader(self._monitor.get(zmq.FD), self._read_monitor)
        self._schedule_drain()

    def send(self, identity: bytes, parts: Sequence[Buffer]) -> Sent:
        """Send a message whole or not at all, without waiting."""
        if self._socket.closed:
            return Sent.GONE
        try:
            # Once the identity is taken, so are the frames behind it.
            self._socket.send(identity, _DONTWAIT | _SNDMORE)
            for part in parts[:-1]:
                self._socket.send(part, _DONTWAIT | _SNDMORE, copy=len(part) < SHARED_BYTES)
            self._socket.send(parts[-1], _DONTWAIT, copy=len(parts[-1]) < SHARED_BYTES)
        except zmq.Again:
            return Sent.BLOCKED
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        finally:
            if self._socket.getsockopt(_EVENTS) & _POLLIN:
                self._schedule_drain()
        return Sent.SENT

    def close(self) -> None:
        """Stop receiving, give the last messages a moment to leave, and close."""
        self._loop.remove_reader(self._socket.get(zmq.FD))
        self._loop.remove_reader(self._monitor.get(zmq.FD))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=FAREWELL_MS)
        if self._end_curve is not None:
            self._end_curve()
        self._context.term()

    def _schedule_drain(self) -> None:
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_is_due = False
        if self._socket.closed:
            return
        self._receiver.on_batch()
        try:
            for _ in range(BATCH_MESSAGES):
                if not self._socket.getsockopt(_EVENTS) & _POLLIN:
                    self._report_closed()
                    break
                self._receive()
            else:
                self._schedule_drain()
        finally:
            self._receiver.on_batch_end()

    def _receive(self) -> None:
        identity = self._socket.recv(_DONTWAIT)
        frames: list[memoryview] = []
        more = True
        while more:
            frame = self._socket.recv(_DONTWAIT, copy=False)
            more = frame.more
            if len(frames) < self._max_frames:
                frames.append(frame.buffer)
        connection = self._connections.get(identity) or self._enter(identity, frame)
        if connection is None:
            self._receiver.on_anonymous()
        else:
            self._receiver.on_message(connection, frames)

    def _enter(self, identity: bytes, frame: zmq.Frame) -> Connection | None:
        self._read_monitor()
        peer, descriptor = self._peer_of(frame), frame.get(zmq.SRCFD)
        if peer is None:
            return None
        if descriptor in self._identities:
            self._disconnected(descriptor)
        connection = Connection(identity, peer, self)
        self._connections[identity] = connection
        self._identities[descriptor] = identity
        return connection

    def _read_monitor(self) -> None:
        while self._monitor.getsockopt(_EVENTS) & _POLLIN:
            event, descriptor = _MONITOR_EVENT.unpack(self._monitor.recv_multipart()[0])
            if event == zmq.EVENT_DISCONNECTED:
                self._closed_descriptors.add(descriptor)
                self._schedule_drain()
            elif descriptor in self._closed_descriptors:
                self._closed_descriptors.discard(descriptor)
                self._disconnected(descriptor)

    def _report_closed(self) -> None:
        while self._closed_descriptors:
            self._disconnected(self._closed_descriptors.pop())

    def _disconnected(self, descriptor: int) -> None:
        identity = self._identities.pop(descriptor, None)
        connection = self._connections.pop(identity, None) if identity is not None else None
        if connection is not None:
            self._receiver.on_disconnected(connection)


def _configure(router: zmq.Socket[bytes], limits: Limits, silence_s: float) -> None:
    # The clock of silence starts at a ping, so up to an interval after the last word.
    timeout_ms = max(round(silence_s * 1000) - HEARTBEAT_INTERVAL_MS, LEAST_HEARTBEAT_TIMEOUT_MS)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.MAXMSGSIZE, limits.max_frame_bytes),
        (zmq.SNDHWM, SEND_HIGH_WATER_MESSAGES),
        (zmq.RCVHWM, RECEIVE_HIGH_WATER_MESSAGES),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
        (zmq.HEARTBEAT_TIMEOUT, timeout_ms),
        (zmq.HEARTBEAT_TTL, timeout_ms),
    ):
        router.setsockopt(option, value)
