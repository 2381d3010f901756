"""Open files on a Unix socket: sent with a message's first byte, received with the bytes around it.

The kernel ties descriptors to the byte they were sent with, so a message and its descriptors arrive
together as long as both ends go through here. What arrives is closed on exec.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview

# Plain numbers: an enumeration's members cost a microsecond for each use.
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)

MOST_AT_ONCE = 64
"""Descriptors of one message; Linux takes up to 253 in one call."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(MOST_AT_ONCE * array.array("i").itemsize)


class Outgoing:
    """Bytes, with descriptors of our own, that wait until a non-blocking socket takes them."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, data: Buffer, descriptors: Sequence[int] = ()) -> None:
        """Add bytes; the descriptors may be closed by the caller afterwards."""
        if len(descriptors) > MOST_AT_ONCE:
            raise ValueError(f"{len(descriptors)} descriptors in one message")
        view = memoryview(data).cast("B")
        if view.nbytes:
            self._waiting.append((view, tuple(os.dup(one) for one in descriptors)))

    def send(self, channel: socket.socket) -> None:
        """Send what the socket takes; raises `BlockingIOError` when it is full, or `OSError`."""
        while self._waiting:
            data, descriptors = self._waiting[0]
            sent = channel.sendmsg([data], _ancillary(descriptors), socket.MSG_NOSIGNAL)
            # They went with the first byte, whatever became of the others.
            _close(descriptors)
            self._waiting[0] = (data[sent:], ())
            if sent == data.nbytes:
                self._waiting.popleft()

    def clear(self) -> None:
        """Forget what has not been sent."""
        while self._waiting:
            _close(self._waiting.popleft()[1])


def receive_into(channel: socket.socket, memory: memoryview) -> tuple[int, list[int]]:
    """Wait for bytes; gives their number (0 at the end) and the descriptors that came with them.

    Raises `OSError`, also where descriptors were lost because this process has too many.
    """
    received, ancillary, flags, _ = channel.recvmsg_into([memory], _ANCILLARY_BYTES, _CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = array.array("i")
            whole.frombytes(data[: len(data) // whole.itemsize * whole.itemsize])
            descriptors.extend(whole)
    if flags & _TRUNCATED:
        _close(descriptors)
        raise OSError("descriptors were lost: this process has too many open files")
    return received, descriptors


def _ancillary(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
