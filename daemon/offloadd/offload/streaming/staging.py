"""From disk to a device that has DMA: through a small page-locked buffer, in pieces.

Promises: pieces are copied in the order in which groups were asked for, each as soon as it was read
and the ones before it were copied; a piece of the buffer is filled again only after its copy was
done; host memory stays at the buffer's size however large groups are. Reading goes on in reader
threads; copies are put on the transfer queue by whoever starts or waits for a load.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from offloadd.offload.accelerator.interface import Accelerator, Event
from offloadd.offload.host_memory import anonymous_bytes, view_of
from offloadd.offload.streaming.read_timing import ReadTiming, ServiceClock
from offloadd.offload.streaming.ring import Place, Ring
from offloadd.offload.streaming.tier import Region
from offloadd.offload.streaming.transfers import Load
from offloadd.store.source import WeightSource

STAGING_BYTES = 256 * 1024 * 1024
PIECES = 8
"""A piece is at most this part of the buffer, so that reading and copying overlap."""

READ_ALIGNMENT_BYTES = 4096


@dataclass(slots=True, eq=False)
class _Piece:
    """A part of a group: on disk, then at `place` in the buffer, then on its way to the device."""

    load: StagedLoad
    offset_bytes: int
    size_bytes: int
    place: Place | None = None
    future: Future[int] | None = None
    copied: Event | None = None


class Staging:
    """The buffer, and the pieces that wait for it or are in it."""

    def __init__(
        self,
        accelerator: Accelerator,
        capacity_bytes: int = STAGING_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.accelerator = accelerator
        self.clock = clock
        self._service = ServiceClock(clock)
        self._capacity_bytes = capacity_bytes
        self._ring = Ring(capacity_bytes, READ_ALIGNMENT_BYTES)
        self._memory: torch.Tensor | None = None
        self._unpin: Callable[[], None] | None = None
        self._waiting: deque[_Piece] = deque()
        self._copying: deque[_Piece] = deque()

    @property
    def size_bytes(self) -> int:
        """Page-locked host memory in use; nothing before the first load."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def piece_bytes(self) -> int:
        return self._capacity_bytes // PIECES

    def close(self) -> None:
        """Give the buffer back, after the copies that read from it."""
        while self._copying:
            self._reclaim(wait=True)
        if self._unpin is not None:
            self._unpin()
        self._memory = self._unpin = None

    def add(self, load: StagedLoad, size_bytes: int) -> None:
        """Queue a group behind those that were asked for before."""
        for offset in range(0, size_bytes, self.piece_bytes):
            piece = _Piece(load, offset, min(self.piece_bytes, size_bytes - offset))
            self._waiting.append(piece)
        self.pump()

    def pump(self) -> None:
        """Put what has been read on the transfer queue, and read on into what is free."""
        while self._waiting:
            future = self._waiting[0].future
            if future is None or not future.done() or future.exception() is not None:
                break
            self._copy(self._waiting.popleft())
        self._reclaim(wait=False)
        for piece in self._waiting:
            if piece.future is None and not self._read(piece):
                break

    def advance(self) -> None:
        """Hold the thread until the first waiting piece is a step further.

        Raises StorageFailed if that piece cannot be read.
        """
        future = self._waiting[0].future
        if future is not None:
            future.result()
        else:
            self._reclaim(wait=True)
        self.pump()

    def withdraw(self, load: StagedLoad) -> None:
        """Forget the pieces of a load that are not yet on the transfer queue."""
        for piece in [piece for piece in self._waiting if piece.load is load]:
            if piece.future is not None and not piece.future.cancel():
                concurrent.futures.wait([piece.future])
            if piece.place is not None:
                self._ring.release(piece.place)
            self._waiting.remove(piece)
        self.pump()

    def _read(self, piece: _Piece) -> bool:
        """Start to read a piece; False while the buffer is full."""
        place = self._ring.allocate(piece.size_bytes)
        if place is None:
            return False
        piece.place = place
        start = piece.load.start_bytes + piece.offset_bytes
        into = view_of(self._buffer()[place.start_bytes : place.stop_bytes])
        piece.future = piece.load.source.read(start, start + piece.size_bytes, into)
        return True

    def _copy(self, piece: _Piece) -> None:
        assert piece.place is not None
        queue = self.accelerator.transfer_queue
        if not piece.offset_bytes:
            for last_use in piece.load.region.after:
                queue.wait(last_use)
        stop = piece.offset_bytes + piece.size_bytes
        self.accelerator.copy(
            piece.load.region.tensor[piece.offset_bytes : stop],
            self._buffer()[piece.place.start_bytes : piece.place.stop_bytes],
        )
        piece.copied = piece.load.ready = self.accelerator.event()
        piece.copied.record(queue)
        piece.load.left_bytes -= piece.size_bytes
        if not piece.load.left_bytes:
            self._service.ended(piece.load.timing, piece.load.asked_s)
        self._copying.append(piece)

    def _reclaim(self, *, wait: bool) -> None:
        """Take back the places of finished copies; with `wait`, of at least one."""
        while self._copying:
            piece = self._copying[0]
            assert piece.copied is not None
            assert piece.place is not None
            if wait:
                piece.copied.synchronize()
            elif not piece.copied.query():
                return
            wait = False
            self._ring.release(piece.place)
            self._copying.popleft()

    def _buffer(self) -> torch.Tensor:
        if self._memory is None:
            self._memory = anonymous_bytes(self._capacity_bytes)
            self._unpin = self.accelerator.pin(view_of(self._memory))
        return self._memory


@dataclass(slots=True, eq=False)
class StagedLoad:
    """A group that comes through the buffer; `ready` is recorded behind each of its pieces."""

    region: Region
    source: WeightSource
    start_bytes: int
    left_bytes: int
    staging: Staging
    accelerator: Accelerator
    asked_s: float
    timing: ReadTiming
    ready: Event = field(init=False)

    def wait(self) -> float:
        began_s = self.staging.clock()
        waited = False
        self.staging.pump()
        while self.left_bytes:
            self.staging.advance()
            waited = True
        self.accelerator.compute_queue().wait(self.ready)
        return self.staging.clock() - began_s if waited else 0.0

    def settle(self) -> None:
        if self.left_bytes:
            self.staging.withdraw(self)


class StagedLoader:
    """Brings groups of a component whose extent rests on disk."""

    def __init__(
        self,
        accelerator: Accelerator,
        source: WeightSource,
        staging: Staging,
    ) -> None:
        self._accelerator = accelerator
        self._source = source
        self._staging = staging

    def start(
        self, start_bytes: int, stop_bytes: int, region: Region, *, timed: bool = False
    ) -> Load:
        size_bytes = stop_bytes - start_bytes
        load = StagedLoad(
            region=region,
            source=self._source,
            start_bytes=start_bytes,
            left_bytes=size_bytes,
            staging=self._staging,
            accelerator=self._accelerator,
            asked_s=self._staging.clock(),
            timing=ReadTiming(size_bytes),
        )
        self._staging.add(load, size_bytes)
        return load
