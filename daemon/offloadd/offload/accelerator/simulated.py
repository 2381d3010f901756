"""A device that is simulated on the CPU: limited memory, a slow link, and no mercy.

Time is virtual and depends on nothing but the calls and the seed, so benches measure schedules and
not this machine. Compute is eager, but a copy is carried out as late as the events allow (or
earlier, as the random numbers have it), and until then its destination holds NaN, as does memory
that is fresh or was let go. What values cannot show, since eager compute is always early, the
happens-before record shows: see `hazards`.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload_protocol.errors import OutOfMemory
from offloadd.offload.accelerator.happens_before import Clock, Hazard, Party, Recorder
from offloadd.offload.accelerator.interface import DeviceMemory, Event, Queue
from offloadd.store.layout import ALIGNMENT_BYTES

_POISON = 0xFF
"""A byte that, repeated, is NaN in every floating-point format and -1 in every signed integer."""


@dataclass(frozen=True, slots=True)
class Link:
    """How long a copy takes: latency, bytes over bandwidth, and a random delay up to `jitter_s`."""

    bandwidth_bytes_per_s: float = 1e9
    latency_s: float = 0.0
    jitter_s: float = 0.0


class SimulatedQueue:
    def __init__(self, owner: SimulatedAccelerator, party: Party) -> None:
        self._owner = owner
        self.party = party
        self.free_at_s = 0.0

    def wait(self, event: Event) -> None:
        self._owner._wait(self, cast(SimulatedEvent, event))


class SimulatedEvent:
    """What a record covered: a point in virtual time, a clock, and how many copies."""

    def __init__(self, owner: SimulatedAccelerator) -> None:
        self._owner = owner
        self.at_s = 0.0
        self.clock: Clock = {}
        self.copies = 0

    def record(self, queue: Queue) -> None:
        self._owner._record(cast(SimulatedQueue, queue), self)

    def query(self) -> bool:
        is_over = self.at_s <= self._owner.host_s
        if is_over:
            self._owner._seen(self)
        return is_over

    def synchronize(self) -> None:
        self._owner._synchronize(self)

    def elapsed_s(self, later: Event) -> float:
        return cast(SimulatedEvent, later).at_s - self.at_s


@dataclass(frozen=True, slots=True)
class _LateCopy:
    """A copy that is still to be done; it keeps its source, but not the device's memory."""

    start: int
    size_bytes: int
    source: torch.Tensor


class _Memory(mmap.mmap):
    """Device memory; when the last tensor on it goes, so does this."""


class SimulatedAccelerator:
    """`capacity_bytes` of memory behind a `link`; `random` draws the delays.

    `host_s` is the host's virtual clock: it moves when the host waits, and by `compute` never.
    """

    device = torch.device("cpu")
    has_dma = True
    alignment_bytes = ALIGNMENT_BYTES

    def __init__(self, capacity_bytes: int, link: Link, random: Random) -> None:
        self.capacity_bytes = capacity_bytes
        self.host_s = 0.0
        self.host_waits = 0
        self.allocations = 0
        self.copied_bytes = 0
        self.recorder = Recorder()
        self.transfer_queue: Queue = SimulatedQueue(self, "transfer")
        self._compute = SimulatedQueue(self, "compute")
        self._link = link
        self._random = random
        self._late_copies: deque[_LateCopy | None] = deque()
        self._copies_put = 0
        self._copies_done = 0
        self._blocks: dict[int, int] = {}

    @property
    def hazards(self) -> list[Hazard]:
        """Conflicting accesses that no events order; a right program leaves this empty."""
        return self.recorder.hazards

    @property
    def allocated_bytes(self) -> int:
        return sum(self._blocks.values())

    @property
    def compute_s(self) -> float:
        """When, in virtual time, the compute queue will have done all that was put on it."""
        return self._compute.free_at_s

    def compute_queue(self) -> Queue:
        return self._compute

    def event(self, *, timed: bool = False) -> Event:
        return SimulatedEvent(self)

    def compute(self, seconds: float) -> None:
        """Keep the compute queue busy for that long, as a kernel would."""
        self._put(self._compute, seconds)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        if self.allocated_bytes + size_bytes > self.capacity_bytes:
            free_bytes = self.capacity_bytes - self.allocated_bytes
            raise OutOfMemory(
                f"the simulated device has {free_bytes} bytes free, not {size_bytes}",
                hint="give the model a smaller budget",
                details={"needed_bytes": size_bytes, "free_bytes": free_bytes},
            )
        memory = _Memory(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]
        start = block.data_ptr()
        _spoil(block)
        self.allocations += 1
        self._blocks[start] = size_bytes
        # The allocator hands out memory that kernels already on the compute queue may still use.
        self._touch("compute", start, start + size_bytes, "use before allocation")
        weakref.finalize(memory, _gone, weakref.ref(self), start, size_bytes).atexit = False
        return block

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        size_bytes = destination.nbytes
        start = destination.data_ptr()
        self._touch("transfer", start, start + size_bytes, "copy from the host")
        delay_s = self._random.uniform(0, self._link.jitter_s) if self._link.jitter_s else 0.0
        seconds = self._link.latency_s + size_bytes / self._link.bandwidth_bytes_per_s
        self._put(cast(SimulatedQueue, self.transfer_queue), seconds + delay_s)
        self.copied_bytes += size_bytes
        _spoil(destination)
        self._late_copies.append(_LateCopy(start, size_bytes, source))
        self._copies_put += 1
        self._carry_out_some()

    def retire(self, region: torch.Tensor) -> None:
        _spoil(region)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.capacity_bytes - self.allocated_bytes, self.capacity_bytes)

    def peak_bytes(self) -> int:
        return 0

    def restart_peak(self) -> None:
        return

    def pin(self, view: memoryview) -> Callable[[], None] | None:
        return None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record what every torch operation inside reads and writes of the device's memory."""
        with _Watch(self):
            yield

    def _put(self, queue: SimulatedQueue, seconds: float) -> None:
        queue.free_at_s = max(queue.free_at_s, self.host_s) + seconds

    def _record(self, queue: SimulatedQueue, event: SimulatedEvent) -> None:
        event.at_s = max(queue.free_at_s, self.host_s)
        event.clock = self.recorder.snapshot(queue.party)
        event.copies = self._copies_put if queue is self.transfer_queue else 0
        self._carry_out_some()

    def _wait(self, queue: SimulatedQueue, event: SimulatedEvent) -> None:
        queue.free_at_s = max(queue.free_at_s, event.at_s)
        self.recorder.wait(queue.party, event.clock)
        if queue is self._compute:
            self._carry_out(event.copies)
        self._carry_out_some()

    def _synchronize(self, event: SimulatedEvent) -> None:
        self.host_waits += 1
        self.host_s = max(self.host_s, event.at_s)
        self._seen(event)

    def _seen(self, event: SimulatedEvent) -> None:
        """The host knows that what the event covers is done."""
        self.recorder.wait("host", event.clock)
        self._carry_out(event.copies)

    def _carry_out_some(self) -> None:
        late = self._copies_put - self._copies_done
        if late:
            self._carry_out(self._copies_done + self._random.randint(0, late))

    def _carry_out(self, copies: int) -> None:
        while self._copies_done < copies:
            late = self._late_copies.popleft()
            if late is not None:
                # Not torch's copy: a watched operation would be taken for one of the program's.
                ctypes.memmove(late.start, late.source.data_ptr(), late.size_bytes)
            self._copies_done += 1

    def _gone(self, start: int, size_bytes: int) -> None:
        del self._blocks[start]
        # The allocator may give this memory at once to the next kernel on the compute queue.
        self._touch("compute", start, start + size_bytes, "reuse after the last reference went")
        self.recorder.forget(start, start + size_bytes)
        for index, late in enumerate(self._late_copies):
            if late is not None and start <= late.start < start + size_bytes:
                self._late_copies[index] = None

    def _touch(
        self, party: Party, start: int, stop: int, purpose: str, *, writes: bool = True
    ) -> None:
        self.recorder.access(party, start, stop, writes=writes, purpose=purpose)

    def _compute_touches(self, tensor: torch.Tensor, purpose: str, writes: bool) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu" or storage.data_ptr() not in self._blocks:
            return
        start = tensor.data_ptr()
        extent = 1 + sum(
            (n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if tensor.numel():
            stop = start + extent * tensor.element_size()
            self._touch("compute", start, stop, purpose, writes=writes)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the device about each operation on its memory; views read nothing."""

    def __init__(self, owner: SimulatedAccelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            for value, argument in zip(args, func._schema.arguments, strict=False):
                writes = bool(argument.alias_info and argument.alias_info.is_write)
                for leaf in tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        self._owner._compute_touches(leaf, str(func), writes)
        return func(*args, **kwargs)


def _spoil(region: torch.Tensor) -> None:
    ctypes.memset(region.data_ptr(), _POISON, region.nbytes)


def _gone(owner_ref: weakref.ref[SimulatedAccelerator], start: int, size_bytes: int) -> None:
    owner = owner_ref()
    if owner is not None:
        owner._gone(start, size_bytes)
