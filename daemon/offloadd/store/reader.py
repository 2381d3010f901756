"""The disk reader: a few threads that fill memory from weight files as fast as the disk gives.

One large range is read by all threads at once, many ranges one after the other in the order of
the plan, and a range that somebody waits for goes first. A failing file fails the requests that
need it and nothing else.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from offload_protocol.errors import InternalError, OffloadError, ShuttingDown
from offloadd.store.open_file import OpenFile
from offloadd.store.prefault import prefault
from offloadd.store.read_plan import BLOCK_BYTES, Chunk, Segment, fair_chunk_bytes, plan_chunks
from offloadd.store.read_queue import ReadQueue, ReadRequest
from offloadd.store.scatter import scatter

SMALLEST_CHUNK_BYTES = 1024 * 1024
DEFAULT_CHUNK_BYTES = 8 * 1024 * 1024
DEFAULT_THREADS = 4
_PREFAULT_FROM_BYTES = 64 * 1024


class DiskReader:
    """Threads with one bounce buffer each (`threads * chunk_bytes` of memory, allocated once)."""

    def __init__(
        self, *, threads: int = DEFAULT_THREADS, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> None:
        """`chunk_bytes` is a multiple of 4096 and at least 1 MiB."""
        if threads < 1 or chunk_bytes < SMALLEST_CHUNK_BYTES or chunk_bytes % BLOCK_BYTES:
            raise ValueError(f"{threads} reader threads with chunks of {chunk_bytes} bytes")
        self._chunk_bytes = chunk_bytes
        self._queue = ReadQueue()
        self._counter_lock = threading.Lock()
        self._read_bytes_total = 0
        self._threads = [
            threading.Thread(target=self._serve, name=f"disk-reader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def read_bytes_total(self) -> int:
        """Bytes of weights read from disk since the reader was made."""
        with self._counter_lock:
            return self._read_bytes_total

    def read(
        self,
        files: Sequence[OpenFile],
        segments: Sequence[Segment],
        into: memoryview,
        *,
        urgent: bool = False,
    ) -> Future[int]:
        """Fill `into` (writable, contiguous) with the segments, in the background.

        The future gives the bytes read; bytes of `into` outside the segments stay as they are.
        It can be cancelled until its first byte is read, and fails with `StorageFailed`, or
        with `ShuttingDown` when the reader is closed; either way nothing is written into `into`
        any more once it is done. `urgent` puts it before all that is not.
        """
        if into.readonly:
            raise ValueError("the destination of a read must be writable")
        total = sum(segment.size_bytes for segment in segments)
        chunk_bytes = fair_chunk_bytes(
            total, len(self._threads), smallest=SMALLEST_CHUNK_BYTES, largest=self._chunk_bytes
        )
        chunks = plan_chunks(segments, chunk_bytes)
        if not chunks:
            nothing: Future[int] = Future()
            nothing.set_result(0)
            return nothing
        request = ReadRequest(files, chunks, np.frombuffer(into, np.uint8))
        try:
            self._queue.put(request, urgent=urgent)
        except ShuttingDown as error:
            request.let_go()
            request.future.set_exception(error)
        return request.future

    def close(self) -> None:
        """Stop the threads after the chunks that they are reading; waiting requests are cancelled.

        A request of which a part was read already fails with `ShuttingDown`.
        """
        self._queue.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> DiskReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        bounce = _bounce_buffer(self._chunk_bytes)
        while (taken := self._queue.take()) is not None:
            request, chunk = taken
            del taken
            self._serve_chunk(request, chunk, bounce)
            # Held on, the request would keep its files open until the next one comes.
            del request, chunk

    def _serve_chunk(self, request: ReadRequest, chunk: Chunk, bounce: NDArray[np.uint8]) -> None:
        # Stands if the read ends by a fault of this program: the thread dies with its trace, and
        # whoever waits for the bytes is told.
        failure: OffloadError | None = InternalError(
            "a disk reader thread broke off", hint="the daemon's log has the trace"
        )
        try:
            _read_chunk(request, chunk, bounce)
            failure = None
        except OffloadError as error:
            failure = error
            _forget_frames(error)
        finally:
            read_bytes = 0 if failure else chunk.payload_bytes
            with self._counter_lock:
                self._read_bytes_total += read_bytes
            self._queue.done(request, read_bytes, failure)


def _bounce_buffer(size_bytes: int) -> NDArray[np.uint8]:
    """Page-aligned memory for direct reads, in huge pages where the kernel gives them.

    Huge pages let the disk be asked for larger pieces: a quarter less processor time per byte and
    up to 1.4 times the rate (virtio disk, two-core virtual machine, Linux 6.18).
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel built without huge pages refuses; ordinary pages serve as well.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _read_chunk(request: ReadRequest, chunk: Chunk, bounce: NDArray[np.uint8]) -> None:
    target = request.target
    if target is None:
        raise AssertionError("a request was completed while a chunk of it was being read")
    file = request.files[chunk.file_index]
    address: int = target.__array_interface__["data"][0]
    divided = scatter(chunk, address, file.alignment)
    buffers: list[memoryview] = []
    cursor = 0
    for vector in divided.vectors:
        source, at = (bounce, cursor) if vector.into_bytes is None else (target, vector.into_bytes)
        buffers.append(source[at : at + vector.size_bytes].data)
        cursor += vector.size_bytes
    file.read(buffers, chunk.start_bytes, chunk.needed_bytes)
    for copy in divided.copies:
        if copy.size_bytes >= _PREFAULT_FROM_BYTES:
            prefault(address + copy.into_bytes, copy.size_bytes)
        # numpy lets go of the interpreter lock for all but the smallest of these.
        target[copy.into_bytes : copy.into_bytes + copy.size_bytes] = bounce[
            copy.bounce_bytes : copy.bounce_bytes + copy.size_bytes
        ]


def _forget_frames(error: BaseException) -> None:
    # The frames of a failed read hold views of its destination, which its owner could then not
    # unmap for as long as anybody keeps the error.
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
