"""How a group's bytes come into a region: by DMA from host memory, or read from disk in place.

Promises: after `Load.wait` whatever is put on the compute queue sees the whole group; after
`Load.settle` nothing but the transfer queue, in its order, can still write to the region.
"""

from __future__ import annotations

import concurrent.futures
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from offloadd.offload.accelerator.interface import Accelerator, Event
from offloadd.offload.host_memory import view_of
from offloadd.offload.streaming.read_timing import ReadTiming, ServiceClock
from offloadd.offload.streaming.tier import Region
from offloadd.store.source import WeightSource


class Load(Protocol):
    """A group on its way into a region, or there."""

    @property
    def region(self) -> Region: ...

    def wait(self) -> float:
        """Order compute after the group's arrival; gives the seconds that the host waited.

        Raises StorageFailed if the bytes could not be read.
        """
        ...

    def settle(self) -> None:
        """See to it that the region can be given back, whether or not the group has arrived."""
        ...

    @property
    def timing(self) -> Timing | None:
        """How the bytes came, if that was asked for; it outlives the load."""
        ...


class Timing(Protocol):
    """How long bytes took to come. Holds none of them, nor the memory that they went to."""

    @property
    def size_bytes(self) -> int: ...

    def duration_s(self) -> float | None:
        """Seconds; None while that is not known."""
        ...


class Loader(Protocol):
    """Brings the bytes of one component."""

    def start(
        self, start_bytes: int, stop_bytes: int, region: Region, *, timed: bool = False
    ) -> Load:
        """Begin to fill the region with that range of the component's extent.

        `timed` asks for a `Load.timing`, which costs the device a little.
        """
        ...


@dataclass(slots=True)
class DmaTiming:
    """Two timed events around a copy."""

    size_bytes: int
    begun: Event
    ready: Event

    def duration_s(self) -> float | None:
        return self.begun.elapsed_s(self.ready) if self.ready.query() else None


@dataclass(slots=True)
class DmaLoad:
    """A copy on the transfer queue; `ready` is recorded behind it."""

    region: Region
    accelerator: Accelerator
    ready: Event
    timing: DmaTiming | None

    def wait(self) -> float:
        self.accelerator.compute_queue().wait(self.ready)
        return 0.0

    def settle(self) -> None:
        # The region's next writer comes behind this copy on the same queue.
        return


class DmaLoader:
    """Copies from the component's extent in host memory."""

    def __init__(
        self, accelerator: Accelerator, extent: torch.Tensor, borders: Sequence[int] = ()
    ) -> None:
        """No single copy crosses one of the borders (see `PageLocking`)."""
        self._accelerator = accelerator
        self._extent = extent
        self._borders = borders

    def start(
        self, start_bytes: int, stop_bytes: int, region: Region, *, timed: bool = False
    ) -> Load:
        queue = self._accelerator.transfer_queue
        for last_use in region.after:
            queue.wait(last_use)
        begun = self._accelerator.event(timed=True) if timed else None
        if begun is not None:
            begun.record(queue)
        first = bisect_right(self._borders, start_bytes)
        last = bisect_left(self._borders, stop_bytes)
        cuts = (start_bytes, *self._borders[first:last], stop_bytes)
        for low, high in pairwise(cuts):
            self._accelerator.copy(
                region.tensor[low - start_bytes : high - start_bytes], self._extent[low:high]
            )
        ready = self._accelerator.event(timed=timed)
        ready.record(queue)
        timing = None if begun is None else DmaTiming(region.size_bytes, begun, ready)
        return DmaLoad(region, self._accelerator, ready, timing)


@dataclass(slots=True)
class ReadLoad:
    """A read that reader threads make into the region itself."""

    region: Region
    future: Future[int]
    clock: Callable[[], float]
    timing: ReadTiming

    def wait(self) -> float:
        if self.future.done():
            self.future.result()
            return 0.0
        began_s = self.clock()
        self.future.result()
        return self.clock() - began_s

    def settle(self) -> None:
        if not self.future.cancel():
            concurrent.futures.wait([self.future])


class ReadLoader:
    """Reads from the component's source into memory that the host can address."""

    def __init__(
        self, source: WeightSource, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._source = source
        self._clock = clock
        self._service = ServiceClock(clock)

    def start(
        self, start_bytes: int, stop_bytes: int, region: Region, *, timed: bool = False
    ) -> Load:
        timing, asked_s = ReadTiming(region.size_bytes), self._clock()
        future = self._source.read(start_bytes, stop_bytes, view_of(region.tensor))
        future.add_done_callback(lambda _: self._service.ended(timing, asked_s))
        return ReadLoad(region, future, self._clock, timing)
