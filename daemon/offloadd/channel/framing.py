"""Messages on the socket pair: a count, the lengths, then the body and its frames.

A closed or broken channel raises `ChannelClosed`; both ends treat it as the other's death.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Sequence

import msgspec

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
        """Wait for the next message; raises `ChannelClosed`."""
        (count,) = _COUNT.unpack(self._exactly(_COUNT.size))
        lengths = [_LENGTH.unpack(self._exactly(_LENGTH.size))[0] for _ in range(count)]
        body, *frames = (self._exactly(length) for length in lengths)
        return self._decoder.decode(body), frames

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _exactly(self, size_bytes: int) -> bytearray:
        data = bytearray(size_bytes)
        rest = memoryview(data)
        while rest:
            try:
                received = self._socket.recv_into(rest)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if received == 0:
                raise ChannelClosed("the control plane closed the channel")
            rest = rest[received:]
        return data


class ControlEnd:
    """The control plane's end, on its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[WorkerNews] = msgspec.msgpack.Decoder(WorkerNews)

    @classmethod
    async def open(cls, channel: socket.socket) -> ControlEnd:
        """Take over a connected socket."""
        channel.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=channel)
        return cls(reader, writer)

    def send(self, message: ToWorker, frames: Sequence[Frame] = ()) -> None:
        """Queue a message; a dead worker shows at `receive`, never here."""
        body = _encoder.encode(message)
        self._writer.write(_head(body, frames) + body)
        for frame in frames:
            self._writer.write(frame)

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
        """Close the socket; the worker exits when it notices."""
        self._writer.close()
