"""Who reads what next: requests in the order they came, a synchronous miss before all others.

Invariant: a request's future is completed exactly once, and only when no thread is still writing
into its destination; then the queue has already let go of the destination, so that the owner may
unmap it. A request can be cancelled until its first chunk has been taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload_protocol.errors import OffloadError, ShuttingDown
from offloadd.store.open_file import OpenFile
from offloadd.store.read_plan import Chunk


@dataclass(slots=True, eq=False)
class ReadRequest:
    """One range on its way: its chunks, its destination (as bytes) and its state."""

    files: Sequence[OpenFile]
    chunks: Sequence[Chunk]
    target: NDArray[np.uint8] | None
    future: Future[int] = field(default_factory=Future)
    next_chunk: int = 0
    in_flight: int = 0
    read_bytes: int = 0
    failure: BaseException | None = None

    def let_go(self) -> None:
        """Drop the files and the destination, before the owner of either hears of the end."""
        self.files = ()
        self.target = None

    @property
    def is_exhausted(self) -> bool:
        return self.failure is not None or self.next_chunk == len(self.chunks)


class ReadQueue:
    """Hands chunks to reader threads; every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent: deque[ReadRequest] = deque()
        self._ahead: deque[ReadRequest] = deque()
        self._closed = False

    def put(self, request: ReadRequest, *, urgent: bool) -> None:
        """Queue a request that has at least one chunk. Raises `ShuttingDown` after `close`."""
        with self._changed:
            if self._closed:
                raise _closed_error()
            (self._urgent if urgent else self._ahead).append(request)
            self._changed.notify(len(request.chunks))

    def take(self) -> tuple[ReadRequest, Chunk] | None:
        """The next chunk to read; waits for one. None once the queue is closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                request = self._head()
                if request is not None:
                    chunk = request.chunks[request.next_chunk]
                    request.next_chunk += 1
                    request.in_flight += 1
                    return request, chunk
                self._changed.wait()

    def done(self, request: ReadRequest, read_bytes: int, failure: BaseException | None) -> None:
        """Say that a chunk is finished; completes the request with its last one."""
        with self._changed:
            request.in_flight -= 1
            request.read_bytes += read_bytes
            request.failure = request.failure or failure
            finished = request.in_flight == 0 and request.is_exhausted
        if finished:
            _complete(request)

    def close(self) -> None:
        """Stop handing out chunks; what was not begun is cancelled, what was begun fails."""
        with self._changed:
            self._closed = True
            waiting = [*self._urgent, *self._ahead]
            self._urgent.clear()
            self._ahead.clear()
            begun = [one for one in waiting if one.next_chunk and not one.is_exhausted]
            for request in begun:
                request.failure = _closed_error()
            finished = [one for one in begun if one.in_flight == 0]
            self._changed.notify_all()
        for request in waiting:
            if not request.next_chunk:
                request.let_go()
                request.future.cancel()
                request.future.set_running_or_notify_cancel()
        for request in finished:
            _complete(request)

    def _head(self) -> ReadRequest | None:
        for queue in (self._urgent, self._ahead):
            while queue:
                request = queue[0]
                if request.is_exhausted or self._was_cancelled(request):
                    queue.popleft()
                    continue
                return request
        return None

    @staticmethod
    def _was_cancelled(request: ReadRequest) -> bool:
        if request.next_chunk or request.future.set_running_or_notify_cancel():
            return False
        request.let_go()
        return True


def _complete(request: ReadRequest) -> None:
    request.let_go()
    future: Future[Any] = request.future
    if request.failure is not None:
        future.set_exception(request.failure)
    else:
        future.set_result(request.read_bytes)


def _closed_error() -> OffloadError:
    return ShuttingDown("the disk reader was closed", hint="the daemon is stopping")
