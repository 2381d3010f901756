"""Messages on the socket pair: a count, the lengths, then the body and its frames.

The control plane may send descriptors along, which the worker then owns. A closed or broken channel
raises `ChannelClosed`; both ends treat it as the other's death.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Sequence

import msgspec

from offloadd.channel.descriptors import Outgoing, receive_into
from offloadd.channel.messages import FromWorker, ToWorker, WorkerNews, WorkerOrder

Frame = bytes | bytearray | memoryview

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()


class ChannelClosed(ConnectionError):
    """The other end of the channel has gone."""


def _head(body: bytes, frames: Sequence[Frame]) -> bytes:
    lengths = (len(body), *(memoryview(frame).nbytes for frame in frames))
    return _COUNT.pack(len(lengths)) + b"".join(_LENGTH.pack(length) for length in lengths)


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
        (count,) = _COUNT.unpack(self._exactly(_COUNT.size))
        lengths = [_LENGTH.unpack(self._exactly(_LENGTH.size))[0] for _ in range(count)]
        body, *frames = (self._exactly(length) for length in lengths)
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
    """The control plane's end, on its event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sending: socket.socket
    ) -> None:
        """`sending` is the same socket under a number of its own.

        A stream can't send descriptors, and the loop lets nobody else watch a stream's socket.
        """
        self._reader = reader
        self._writer = writer
        self._sending = sending
        self._outgoing = Outgoing()
        self._loop = asyncio.get_running_loop()
        self._decoder: msgspec.msgpack.Decoder[WorkerNews] = msgspec.msgpack.Decoder(WorkerNews)

    @classmethod
    async def open(cls, channel: socket.socket) -> ControlEnd:
        """Take over a connected socket."""
        channel.setblocking(False)
        sending = channel.dup()
        reader, writer = await asyncio.open_connection(sock=channel)
        return cls(reader, writer, sending)

    def send(
        self, message: ToWorker, frames: Sequence[Frame] = (), descriptors: Sequence[int] = ()
    ) -> None:
        """Queue a message; a dead worker shows at `receive`, never here.

        The worker gets descriptors of its own for the same open files (at most 64).
        """
        if self._sending.fileno() < 0:
            return
        body = _encoder.encode(message)
        was_waiting = bool(self._outgoing)
        self._outgoing.put(_head(body, frames) + body, descriptors)
        for frame in frames:
            self._outgoing.put(frame)
        if not was_waiting:
            self._flush()

    def _flush(self) -> None:
        try:
            self._outgoing.send(self._sending)
        except BlockingIOError:
            self._loop.add_writer(self._sending, self._flush)
        except OSError:
            self.close()
        else:
            self._loop.remove_writer(self._sending)

    async def receive(self) -> tuple[WorkerNews, list[bytes]]:
        """Wait for the next message; raises `ChannelClosed`."""
        try:
            (count,) = _COUNT.unpack(await self._reader.readexactly(_COUNT.size))
            head = await self._reader.readexactly(_LENGTH.size * count)
            lengths = [length for (length,) in _LENGTH.iter_unpack(head)]
            body, *frames = [await self._reader.readexactly(length) for length in lengths]
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChannelClosed("the worker closed the channel") from error
        return self._decoder.decode(body), frames

    def close(self) -> None:
        """Close the socket; the worker exits when it notices. What was not sent is lost."""
        if self._sending.fileno() < 0:
            return
        self._loop.remove_writer(self._sending)
        self._sending.close()
        self._outgoing.clear()
        self._writer.close()
