"""Messages on the socket pair: a count, the lengths, then the body and its frames.

The control plane may send descriptors along, which the worker then owns. Both ends treat a closed
or broken channel as the other's death: the worker's raises `ChannelClosed`, ours ends `listen`.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from offloadd.channel.descriptors import Outgoing, receive_into
from offloadd.channel.incoming import CHUNK_BYTES, HEAD, LENGTH, Incoming
from offloadd.channel.messages import FromWorker, ToWorker, WorkerNews, WorkerOrder

Frame = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()


class ChannelClosed(ConnectionError):
    """The other end of the channel has gone."""


def _head(body: bytes, frames: Sequence[Frame]) -> bytes:
    head = HEAD.pack(1 + len(frames), len(body))
    if not frames:
        return head
    return head + b"".join(LENGTH.pack(memoryview(frame).nbytes) for frame in frames)


class WorkerEnd:
    """The worker's end: blocking; one thread receives, any thread sends."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._send_lock = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[WorkerOrder] = msgspec.msgpack.Decoder(WorkerOrder)
        self._room = memoryview(bytearray(CHUNK_BYTES))
        self._ahead = self._room[:0]
        """Received and not taken yet."""
        self._received_bytes = self._taken_bytes = 0
        self._descriptors: deque[tuple[int, list[int]]] = deque()
        """With the bytes that had been received when they came."""
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    def send(self, message: FromWorker, frames: Sequence[Frame] = ()) -> None:
        """Send a message whole; raises `ChannelClosed`."""
        body = _encoder.encode(message)
        try:
            with self._send_lock:
                self._socket.sendall(_head(body, frames) + body)
                for frame in frames:
                    self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> tuple[WorkerOrder, list[bytearray]]:
        """Wait for the next message; descriptors that come with it are closed.

        Raises `ChannelClosed`.
        """
        message, frames, descriptors = self.receive_all()
        for descriptor in descriptors:
            os.close(descriptor)
        return message, frames

    def receive_all(self) -> tuple[WorkerOrder, list[bytearray], list[int]]:
        """Wait for the next message with its frames and descriptors; raises `ChannelClosed`."""
        count, body_bytes = HEAD.unpack(self._next(HEAD.size))
        lengths = list(LENGTH.iter_unpack(self._next(LENGTH.size * (count - 1))))
        message = self._decoder.decode(self._next(body_bytes))
        frames = [self._frame(length) for (length,) in lengths]
        return message, frames, self._own_descriptors()

    def is_readable(self, timeout_s: float) -> bool:
        """Wait for something to receive, for so long at most."""
        return bool(self._ahead) or bool(self._poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _next(self, size_bytes: int) -> memoryview:
        """The next bytes, which are valid until the next call."""
        while len(self._ahead) < size_bytes:
            self._read_ahead(size_bytes)
        data, self._ahead = self._ahead[:size_bytes], self._ahead[size_bytes:]
        self._taken_bytes += size_bytes
        return data

    def _frame(self, size_bytes: int) -> bytearray:
        frame = bytearray(size_bytes)
        ready = self._next(min(size_bytes, len(self._ahead)))
        frame[: len(ready)] = ready
        rest = memoryview(frame)[len(ready) :]
        while rest:
            received = self._receive_into(rest)
            self._taken_bytes += received
            rest = rest[received:]
        return frame

    def _read_ahead(self, wanted_bytes: int) -> None:
        """Receive more behind what is there, which moves to the front of the room."""
        ahead_bytes = len(self._ahead)
        room = self._room
        if wanted_bytes > len(room):
            room = memoryview(bytearray(wanted_bytes))
        # Through a copy, since the two places may overlap.
        room[:ahead_bytes] = bytes(self._ahead)
        received = self._receive_into(room[ahead_bytes:])
        self._ahead = room[: ahead_bytes + received]

    def _receive_into(self, memory: memoryview) -> int:
        try:
            received, descriptors = receive_into(self._socket, memory)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if received == 0:
            raise ChannelClosed("the control plane closed the channel")
        self._received_bytes += received
        if descriptors:
            self._descriptors.append((self._received_bytes, descriptors))
        return received

    def _own_descriptors(self) -> list[int]:
        """Those of the message that has just been taken.

        The kernel ends a read behind the bytes that descriptors were sent with, so they belong to
        the message in which the read that brought them ended.
        """
        own: list[int] = []
        while self._descriptors and self._descriptors[0][0] <= self._taken_bytes:
            own += self._descriptors.popleft()[1]
        return own


class ControlEnd:
    """The control plane's end, on its event loop: no stream, no task between socket and taker.

    Each of those would cost a turn of the loop for every message.
    """

    def __init__(self, channel: socket.socket) -> None:
        """Take over a connected socket; to be made within the event loop."""
        channel.setblocking(False)
        self._socket = channel
        self._incoming = Incoming()
        self._outgoing = Outgoing()
        self._is_blocked = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._decoder: msgspec.msgpack.Decoder[WorkerNews] = msgspec.msgpack.Decoder(WorkerNews)

    async def listen(self, take: Callable[[WorkerNews, list[bytearray]], None]) -> None:
        """Hand over each message as it comes; returns when the channel is closed at either end.

        Raises what decoding a message that cannot be read raises, and what `take` raises.
        """
        if not self._is_closed:
            self._loop.add_reader(self._socket, self._read, take)
        await self._ended

    def send(
        self, message: ToWorker, frames: Sequence[Frame] = (), descriptors: Sequence[int] = ()
    ) -> None:
        """Queue a message; a dead worker ends `listen`, and shows nowhere else.

        The worker gets descriptors of its own for the same open files (at most 64).
        """
        if self._is_closed:
            return
        body = _encoder.encode(message)
        was_waiting = bool(self._outgoing)
        start = _head(body, frames) + body
        if not (was_waiting or frames or descriptors):
            self._send_now(start)
            return
        self._outgoing.put(start, descriptors)
        for frame in frames:
            self._outgoing.put(frame)
        if not was_waiting:
            self._flush()

    def close(self) -> None:
        """Close the socket; the worker exits when it notices. What was not sent is lost."""
        if self._is_closed:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._outgoing.clear()
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def _is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def _send_now(self, data: bytes) -> None:
        """Send a small message at once, as most are; what does not go is queued."""
        try:
            sent = self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:
            # What the worker said last may still be there to be read.
            return
        if sent < len(data):
            self._outgoing.put(memoryview(data)[sent:])
            self._flush()

    def _flush(self) -> None:
        try:
            self._outgoing.send(self._socket)
        except BlockingIOError:
            self._is_blocked = True
            self._loop.add_writer(self._socket, self._flush)
        except OSError:
            # What the worker said last may still be there to be read.
            self._outgoing.clear()
            self._loop.remove_writer(self._socket)
        else:
            if self._is_blocked:
                self._is_blocked = False
                self._loop.remove_writer(self._socket)

    def _read(self, take: Callable[[WorkerNews, list[bytearray]], None]) -> None:
        try:
            goes_on = self._incoming.read(self._socket)
            for body, *frames in self._incoming.messages():
                take(self._decoder.decode(body), frames)
                if self._is_closed:
                    return
        except ConnectionError:
            self._stop_reading(None)
        except Exception as error:  # noqa: BLE001 - a callback raises to nobody: `listen` has to
            self._stop_reading(error)
        else:
            if not goes_on:
                self._stop_reading(None)

    def _stop_reading(self, error: Exception | None) -> None:
        self._loop.remove_reader(self._socket)
        # Done already where whoever listened was cancelled.
        if not self._ended.done() and error is not None:
            self._ended.set_exception(error)
        elif not self._ended.done():
            self._ended.set_result(None)
