"""Parts what a non-blocking socket gives into messages: a count, the lengths, then that many parts.

One read takes all the small messages that are there; what is left of a large part is read into its
place. A message is given out once, and only whole.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator

import msgspec

HEAD = struct.Struct("<IQ")
"""The number of parts, at least 1, and the length of the first; the other lengths follow."""

LENGTH = struct.Struct("<Q")

MAX_PARTS = 1 << 16
MAX_PART_BYTES = 1 << 40
"""More than these is no message of ours, but bytes that were taken for one."""

CHUNK_BYTES = 1 << 16
TURN_BYTES = 1 << 20
"""Read at most this before the event loop is let go for its other work."""

Parts = list[bytearray]


class Incoming:
    """The half-read message of one socket."""

    def __init__(self) -> None:
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._head = bytearray(HEAD.size)
        self._lengths = bytearray()
        self._parts: Parts = []
        self._rest = memoryview(self._head)
        self._ahead: deque[memoryview] = deque()
        self._whole: deque[Parts] = deque()

    def read(self, channel: socket.socket) -> bool:
        """Read what is there, up to a bound; False at the end.

        Raises `msgspec.ValidationError` for what cannot be a message, and `OSError`.
        """
        budget_bytes = TURN_BYTES
        while budget_bytes > 0:
            is_large = len(self._rest) >= CHUNK_BYTES
            target = self._rest if is_large else self._chunk
            try:
                received = channel.recv_into(target)
            except BlockingIOError:
                break
            if received == 0:
                return False
            if is_large:
                self._advance(received)
            else:
                self._take(self._chunk[:received])
            if received < len(target):
                break
            budget_bytes -= received
        return True

    def messages(self) -> Iterator[Parts]:
        """The whole messages that have arrived and not been given out."""
        while self._whole:
            yield self._whole.popleft()

    def _take(self, data: memoryview) -> None:
        while data:
            if not self._parts and len(self._rest) == HEAD.size:
                # Between two messages; most are small, by themselves, and here as a whole.
                data = data[self._take_whole(data) :]
            size_bytes = min(len(data), len(self._rest))
            self._rest[:size_bytes] = data[:size_bytes]
            self._advance(size_bytes)
            data = data[size_bytes:]

    def _take_whole(self, data: memoryview) -> int:
        """Take messages without frames that are there to their end; gives their bytes."""
        start = 0
        while len(data) - start >= HEAD.size:
            count, first_bytes = HEAD.unpack_from(data, start)
            end = start + HEAD.size + first_bytes
            if count != 1 or end > len(data):
                break
            self._whole.append([bytearray(data[start + HEAD.size : end])])
            start = end
        return start

    def _advance(self, size_bytes: int) -> None:
        self._rest = self._rest[size_bytes:]
        while not self._rest:
            if self._ahead:
                self._rest = self._ahead.popleft()
            elif not self._parts and not self._lengths:
                self._begin()
            elif len(self._parts) == 1 and self._lengths:
                self._add_frames()
            else:
                self._whole.append(self._parts)
                self._parts, self._rest = [], memoryview(self._head)

    def _begin(self) -> None:
        count, first_bytes = HEAD.unpack(self._head)
        if not 1 <= count <= MAX_PARTS:
            raise msgspec.ValidationError(f"a message of {count} parts")
        self._parts = [_part(first_bytes)]
        self._lengths = bytearray(LENGTH.size * (count - 1))
        self._ahead += [memoryview(self._lengths), memoryview(self._parts[0])]

    def _add_frames(self) -> None:
        self._parts += [_part(length) for (length,) in LENGTH.iter_unpack(self._lengths)]
        self._lengths = bytearray()
        self._ahead += map(memoryview, self._parts[1:])


def _part(size_bytes: int) -> bytearray:
    if size_bytes > MAX_PART_BYTES:
        raise msgspec.ValidationError(f"a part of {size_bytes} bytes")
    try:
        return bytearray(size_bytes)
    except MemoryError:
        raise msgspec.ValidationError(f"a part of {size_bytes} bytes") from None
