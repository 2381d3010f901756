"""The device memory that weights may take: a ring for what passes, and regions for what stays.

Promises: all regions together never exceed the limit. Memory changes hands between the queues only
through events: a region comes with those that its writer must wait for on the transfer queue, and
memory that is given up is first ordered after every copy that was put on that queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload_protocol.errors import OutOfMemory
from offloadd.offload.accelerator.interface import Accelerator, Event
from offloadd.offload.streaming.ring import Place, Ring


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Bytes of device memory; `place` is None outside the ring.

    Whoever writes must let the transfer queue wait for `after` first.
    """

    tensor: torch.Tensor
    place: Place | None
    after: tuple[Event, ...]

    @property
    def size_bytes(self) -> int:
        return self.tensor.nbytes


class DeviceTier:
    """At most `limit_bytes` of the accelerator's memory; `used_bytes` includes the whole ring.

    `explain` says, for the error, what the memory is planned for when there is not enough.
    """

    def __init__(self, accelerator: Accelerator, limit_bytes: int) -> None:
        self.explain: Callable[[], str] = lambda: ""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.allocations = 0
        self.alignment_bytes = accelerator.alignment_bytes
        self._accelerator = accelerator
        self._ring = Ring(0, accelerator.alignment_bytes)
        self._ring_memory: torch.Tensor | None = None
        self._last_uses: list[tuple[Place, Event]] = []

    @property
    def ring_bytes(self) -> int:
        return self._ring.capacity_bytes

    @property
    def room_bytes(self) -> int:
        """How much more may be allocated; below zero when the limit was lowered."""
        return self.limit_bytes - self.used_bytes

    def set_ring(self, capacity_bytes: int) -> None:
        """Exchange the ring, in which no place may be live, for one of that size.

        Raises OutOfMemory when there is no memory for it; then the ring has the size it had, if
        that is to be had still, or none.
        """
        if self._ring.live:
            raise ValueError(f"{len(self._ring.live)} places of the ring are in use")
        before_bytes = self._ring.capacity_bytes
        if capacity_bytes == before_bytes:
            return
        if self._ring_memory is not None:
            self._order_release()
        self.used_bytes -= before_bytes
        self._ring, self._ring_memory = Ring(0, self._accelerator.alignment_bytes), None
        self._last_uses = []
        try:
            self._make_ring(capacity_bytes)
        except OutOfMemory as error:
            with contextlib.suppress(OutOfMemory):
                self._make_ring(before_bytes)
            raise error

    def _make_ring(self, capacity_bytes: int) -> None:
        if not capacity_bytes:
            return
        self._ring_memory, fresh = self._take(capacity_bytes)
        self._ring = Ring(capacity_bytes, self._accelerator.alignment_bytes)
        self._last_uses = [(Place(0, capacity_bytes), fresh)]

    def place(self, size_bytes: int) -> Region | None:
        """A region of the ring; None while places are in the way, or if the ring is too small."""
        if self._ring_memory is None or size_bytes > self._ring.capacity_bytes:
            return None
        place = self._ring.allocate(size_bytes)
        if place is None:
            return None
        tensor = self._ring_memory[place.start_bytes : place.stop_bytes]
        return Region(tensor, place, self._claim(place))

    def allocate(self, size_bytes: int) -> Region:
        """A region of its own; raises OutOfMemory over the limit or when the device has no more."""
        memory, fresh = self._take(size_bytes)
        return Region(memory, None, (fresh,))

    def release(self, region: Region) -> None:
        """Give a region back once all that reads it has been put on the compute queue."""
        if region.place is None:
            self._order_release()
            self.used_bytes -= region.size_bytes
            return
        last_use = self._accelerator.event()
        last_use.record(self._accelerator.compute_queue())
        self._last_uses.append((region.place, last_use))
        self._ring.release(region.place)
        self._accelerator.retire(region.tensor)

    def _take(self, size_bytes: int) -> tuple[torch.Tensor, Event]:
        if size_bytes > self.room_bytes:
            raise OutOfMemory(
                f"{size_bytes} bytes for weights are over the budget of {self.limit_bytes} bytes, "
                f"of which {self.used_bytes} are in use\n{self.explain()}".rstrip(),
                hint="raise the budget",
                details={"needed_bytes": size_bytes, "free_bytes": self.room_bytes},
            )
        try:
            memory = self._accelerator.allocate(size_bytes)
        except OutOfMemory as error:
            message = f"{error.message}\n{self.explain()}".rstrip()
            raise OutOfMemory(message, hint=error.hint, details=error.details) from error
        self.used_bytes += size_bytes
        self.allocations += 1
        # What had this memory before may still be running on the compute queue.
        fresh = self._accelerator.event()
        fresh.record(self._accelerator.compute_queue())
        return memory, fresh

    def _order_release(self) -> None:
        """Before memory goes to whom the allocator likes: no copy into it may still be to come."""
        copied = self._accelerator.event()
        copied.record(self._accelerator.transfer_queue)
        self._accelerator.compute_queue().wait(copied)

    def _claim(self, place: Place) -> tuple[Event, ...]:
        """The last uses of the bytes of a place, which from now on are its own."""
        after: list[Event] = []
        kept: list[tuple[Place, Event]] = []
        for used, event in self._last_uses:
            if not used.overlaps(place):
                kept.append((used, event))
                continue
            after.append(event)
            if used.start_bytes < place.start_bytes:
                kept.append((Place(used.start_bytes, place.start_bytes), event))
            if place.stop_bytes < used.stop_bytes:
                kept.append((Place(place.stop_bytes, used.stop_bytes), event))
        self._last_uses = kept
        return tuple(after)
