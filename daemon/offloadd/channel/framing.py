"""Messages on the socket pair: a count, the lengths, then the body and its frames.

The control plane may send descriptors along, which the worker then owns. Both ends treat a closed
or broken channel as the other's death: the worker's raises `ChannelClosed`, ours ends `listen`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec

from offloadd.channel.descriptors import Outgoing, receive_into
from offloadd.channel.incoming import HEAD, LENGTH, Incoming
from offloadd.channel.messages import FromWorker, ToWorker, WorkerNews, WorkerOrder

Frame = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()


class ChannelClosed(ConnectionError):
    """The other end of the channel has gone."""


def _head(body: bytes, frames: Sequence[Frame]) -> bytes:
    head = HEAD.pack(1 + len(frames), len(body))
    return head + b"".join(LENGTH.pack(memoryview(frame).nbytes) for frame in frames)


class WorkerEnd:
    """The worker's end: blocking; one thread receives, any thread sends."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._send_lock = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[WorkerOrder] = msgspec.msgpack.Decoder(WorkerOrder)
        self._descriptors: list[int] = []

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
        count, body_bytes = HEAD.unpack(self._exactly(HEAD.size))
        lengths_bytes = LENGTH.size * (count - 1)
        start = self._exactly(lengths_bytes + body_bytes)
        body = memoryview(start)[lengths_bytes:]
        lengths = LENGTH.iter_unpack(memoryview(start)[:lengths_bytes])
        frames = [self._exactly(length) for (length,) in lengths]
        descriptors, self._descriptors = self._descriptors, []
        return self._decoder.decode(body), frames, descriptors

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _exactly(self, size_bytes: int) -> bytearray:
        data = bytearray(size_bytes)
        rest = memoryview(data)
        while rest:
            try:
                received, descriptors = receive_into(self._socket, rest)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            self._descriptors += descriptors
            if received == 0:
                raise ChannelClosed("the control plane closed the channel")
            rest = rest[received:]
        return data


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
        self._outgoing.put(_head(body, frames) + body, descriptors)
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
