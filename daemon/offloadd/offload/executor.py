"""Moves groups to the device just before they compute, and gives their memory on just after.

Invariants:
- A group is bound only between `acquire` and `release`, or while it stays on the device.
- Every hand-over of memory between the queues is ordered by an event: arrival before compute
  (`Load.wait`), last use before the next copy (`Region.after`); in steady state the host waits for
  nothing inside a forward. (A disk read into memory that compute uses directly has no queue; there
  the host is what waits.)
- What is fetched ahead is a guess: any other group is fetched when it is needed, dropping guesses
  if their memory is wanted, so the order of calls never changes a result.
- Whatever is raised, no state is left that the next call has to know about: a step that did not
  end is forgotten when its root is entered again.

One thread at a time may use an executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offload_protocol.errors import OffloadError, OutOfMemory
from offloadd.offload.accelerator.interface import Accelerator, Event
from offloadd.offload.allowances import Allowance
from offloadd.offload.binding import Binding
from offloadd.offload.counters import Counters
from offloadd.offload.prediction import Prediction
from offloadd.offload.tier import DeviceTier, Region
from offloadd.offload.trace import StepTrace
from offloadd.offload.transfers import Load, Loader

RING_TOLERANCE = 1 / 16
"""By how much of the limit the ring may be off when another component starts to run."""

FORWARDS_AHEAD = 2
"""At a border the host waits for the border before last: one forward is queued while one runs."""


@dataclass(slots=True, eq=False)
class Streamed:
    """A group as the executor sees it; `keep` says that it stays once it has come."""

    component: str
    index: int
    name: str
    start_bytes: int
    stop_bytes: int
    binding: Binding
    loader: Loader
    keep: bool = False
    load: Load | None = None
    bound: bool = False
    users: int = 0

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes

    @property
    def stays(self) -> bool:
        """Whether it is on the device in memory of its own that it is to keep."""
        return self.keep and self.load is not None and self.load.region.place is None


@dataclass(slots=True)
class _Component:
    groups: tuple[Streamed, ...]
    ring_bytes: int = 0
    trace: StepTrace | None = None


class Executor:
    """One ring and one set of resident groups for all components on a device.

    `on_border` is called at every entry of a root's forward, with the component's name, when
    nothing of that step has begun; what it raises ends the call, cleanly. `on_step_end` is called
    when a root's forward returned and none of its groups is in use; `explain` says, for the error,
    what the memory is planned for when there is not enough.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        tier: DeviceTier,
        *,
        on_border: Callable[[str], None] = lambda component: None,
        on_step_end: Callable[[str], None] = lambda component: None,
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self.counters = Counters()
        self.on_border = on_border
        self.on_step_end = on_step_end
        self.explain = explain
        self.prediction = Prediction()
        self._accelerator = accelerator
        self._tier = tier
        self._components: dict[str, _Component] = {}
        self._allowances: dict[str, Allowance] = {}
        self._latest: str | None = None
        self._group_count = 0
        self._ahead: dict[Streamed, None] = {}
        self._lingering: Streamed | None = None
        self._borders: deque[Event] = deque()

    def add(self, component: str, groups: Iterable[Streamed]) -> None:
        """Take charge of a component's groups, all absent."""
        self._components[component] = added = _Component(tuple(groups))
        self._latest = self._latest or component
        self._group_count += len(added.groups)
        self.prediction.add(component)

    def remove(self, component: str) -> None:
        """Let a component go; its weights are absent afterwards."""
        for group in self._components[component].groups:
            group.users = 0
            self._drop(group)
        self._group_count -= len(self._components.pop(component).groups)
        if self._latest == component:
            self._latest = next(reversed(self._components), None)
        if not self._components:
            self._tier.set_ring(0)
            self._borders.clear()
        self.prediction.remove(component)

    def configure(self, component: str, keep: frozenset[int], ring_bytes: int) -> None:
        """Follow a plan from now on: which groups stay, and how large a ring the others need.

        The ring follows the component that runs. Raises OutOfMemory when the device does not give
        it; then groups still run, each in memory of its own.
        """
        self._components[component].ring_bytes = ring_bytes
        for group in self._components[component].groups:
            group.keep = group.index in keep
            if group.load is not None and not group.users and not group.stays:
                self._drop(group)
        if component == self._latest:
            self._set_ring(ring_bytes)

    def allow(self, component: str, allowance: Allowance | None) -> None:
        """Keep the component's weights, with those of all that share it, within an allowance."""
        self._allowances.pop(component, None)
        if allowance is not None:
            self._allowances[component] = allowance

    def trace(self, component: str, trace: StepTrace | None) -> None:
        """Measure the component's steps into `trace`, or stop measuring them."""
        self._components[component].trace = trace

    def resident_bytes(self, component: str) -> int:
        """Bytes of the component's groups that are on the device to stay."""
        groups = self._components[component].groups
        return sum(group.size_bytes for group in groups if group.stays)

    def enter_root(self, component: str) -> None:
        """A border; raises what `on_border` raises."""
        self._let_linger_end()
        for group in self._components[component].groups:
            if group.users:
                # An exception that runs no hooks (KeyboardInterrupt) ended the step before.
                group.users = 0
                self._leave(group)
        self._wait_for_border_before_last()
        self.on_border(component)
        self._mark_border()
        self._end_trace(self.prediction.running)
        self.prediction.begin(component)
        self._use(component)
        trace = self._components[component].trace
        if trace is not None:
            trace.begin()
        self._prefetch()

    def leave_root(self, component: str) -> None:
        """The root's forward returned."""
        self._end_trace(component)
        self.prediction.finish(component)
        self.counters.forwards += 1
        self._let_linger_end()
        self.on_step_end(component)
        self._prefetch()

    def acquire(self, group: Streamed) -> None:
        """Bind the group's weights for what is put on the compute queue from now on.

        Raises StorageFailed or OutOfMemory; then the group is as absent as before.
        """
        if group.users:
            group.users += 1
            return
        if group is self._lingering:
            self._lingering = None
            group.users = 1
            return
        self._let_linger_end()
        before = self.prediction.running
        trace = self._components[group.component].trace
        starts = self.prediction.acquire(group.component, group.index)
        if starts:
            self._rootless_step(before, group.component)
        if trace is not None:
            trace.need(group.index)
        is_missing = group.load is None
        load = self._fetch(group) if group.load is None else group.load
        if not group.bound:
            self._await(group, load)
        self._ahead.pop(group, None)
        if trace is not None:
            trace.have(load)
        group.users = 1
        if is_missing or starts:
            self._prefetch()

    def release(self, group: Streamed) -> None:
        """Say that what used the group's weights has been put on the compute queue."""
        if not group.users:
            return
        group.users -= 1
        if group.users or (group.stays and not group.binding.converts):
            return
        # Kept until something else is needed: the same module is often called again at once.
        self._let_linger_end()
        self._lingering = group

    def _rootless_step(self, before: str | None, component: str) -> None:
        """A step begins that no root's forward announces; it also ends the one before."""
        self._end_trace(before)
        self._use(component)
        trace = self._components[component].trace
        if trace is not None:
            trace.begin()

    def _end_trace(self, component: str | None) -> None:
        trace = self._components[component].trace if component in self._components else None
        if trace is not None:
            trace.finish()

    def make_room(self, size_bytes: int, component: str) -> None:
        """Send residents of other, idle components away until so much is free for this one."""
        self._make_room(size_bytes, component)

    def drop_all(self) -> None:
        """Empty the device of all groups that are not in use, residents too."""
        self._let_linger_end()
        for component in self._components.values():
            for group in component.groups:
                if not group.users:
                    self._drop(group)

    def _await(self, group: Streamed, load: Load) -> None:
        try:
            waited_s = load.wait()
        except OffloadError:
            self._drop(group)
            raise
        self.counters.waited_s += waited_s
        if waited_s and self._accelerator.has_dma:
            self.counters.host_syncs += 1
        group.binding.present(load.region.tensor)
        group.bound = True

    def _leave(self, group: Streamed) -> None:
        """A step is over with the group: what passes gives its memory on."""
        if not group.stays:
            self._drop(group)
        elif group.binding.converts:
            group.binding.absent()
            group.bound = False

    def _let_linger_end(self) -> None:
        group, self._lingering = self._lingering, None
        if group is not None:
            self._leave(group)
            self._prefetch()

    def _prefetch(self) -> None:
        """Fetch ahead in the predicted order, as far as there is memory for it."""
        seen: set[Streamed] = set()
        for name, index in self.prediction.upcoming(self._group_count):
            group = self._components[name].groups[index]
            seen.add(group)
            if group.load is not None:
                continue
            region = self._region_ahead(group, seen)
            if region is None:
                return
            try:
                self._start(group, region)
            except OffloadError:
                return  # whoever needs the group will be told

    def _region_ahead(self, group: Streamed, sooner: set[Streamed]) -> Region | None:
        """Memory for a guess; only guesses that are needed later, or never, give way to it."""
        region = self._region_to_stay(group)
        while region is None:
            region = self._tier.place(group.size_bytes)
            if region is None:
                stale = [other for other in self._ahead if other not in sooner]
                if not stale:
                    return None
                self._drop(stale[-1])
        return region

    def _fetch(self, group: Streamed) -> Load:
        """Bring a group that nobody has fetched ahead."""
        self.counters.misses += 1
        region = self._region_to_stay(group)
        while region is None:
            region = self._tier.place(group.size_bytes)
            if region is None and not self._ahead:
                # Groups in use lie in the way, or there is no ring.
                region = self._allocate(group)
            elif region is None:
                self._drop(next(reversed(self._ahead)))
        return self._start(group, region)

    def _allocate(self, group: Streamed) -> Region:
        self._make_room(group.size_bytes, group.component)
        try:
            return self._tier.allocate(group.size_bytes)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"no memory on the device for {group.name!r} of {group.component!r}: "
                f"{error.message}\n{self.explain()}".rstrip(),
                hint=error.hint,
                details=error.details,
            ) from error

    def _region_to_stay(self, group: Streamed) -> Region | None:
        if not group.keep or not self._is_allowed(group.component, group.size_bytes):
            return None
        self._make_room(group.size_bytes, group.component)
        if self._tier.room_bytes < group.size_bytes:
            return None
        try:
            return self._tier.allocate(group.size_bytes)
        except OutOfMemory:
            # The device has less than the budget says: the group passes through the ring instead.
            return None

    def _start(self, group: Streamed, region: Region) -> Load:
        try:
            timed = self._components[group.component].trace is not None
            load = group.loader.start(group.start_bytes, group.stop_bytes, region, timed=timed)
        except BaseException:
            self._tier.release(region)
            raise
        self.counters.moved_bytes += group.size_bytes
        group.load = load
        self._ahead[group] = None
        return load

    def _drop(self, group: Streamed) -> None:
        """Make the group absent and give its memory on."""
        self._ahead.pop(group, None)
        if group is self._lingering:
            self._lingering = None
        load, group.load = group.load, None
        if load is None:
            return
        load.settle()
        if group.bound:
            group.binding.absent()
            group.bound = False
        if load.region.place is None:
            group.binding.forget()
        self._tier.release(load.region)

    def _use(self, component: str) -> None:
        """Keep components in the order of their last use, and the ring fit for the latest."""
        if component == self._latest:
            return
        self._latest = component
        latest = self._components[component] = self._components.pop(component)
        self._is_allowed(component, 0)
        largest = max((g.size_bytes for g in latest.groups if not g.keep), default=0)
        excess = self._tier.ring_bytes - latest.ring_bytes
        # What was fetched ahead across this change is lost when the ring changes. A ring that is
        # somewhat too large costs some residents, one too small some depth: both cost less.
        tolerance = RING_TOLERANCE * self._tier.limit_bytes
        is_over = excess > 0 and component in self._allowances
        if self._tier.ring_bytes < largest or abs(excess) > tolerance or is_over:
            self._set_ring(latest.ring_bytes)

    def _set_ring(self, wanted_bytes: int) -> None:
        if wanted_bytes == self._tier.ring_bytes:
            return
        self._let_linger_end()
        for group in list(self._ahead):
            if group.load is not None and group.load.region.place is not None:
                self._drop(group)
        groups = [group for component in self._components.values() for group in component.groups]
        if any(group.load and group.load.region.place for group in groups):
            return  # another component is inside its forward
        for group in groups:
            if not group.stays:
                group.binding.forget()
        self._make_room(wanted_bytes - self._tier.ring_bytes, self._latest)
        self._tier.set_ring(wanted_bytes)

    def _make_room(self, size_bytes: int, for_component: str | None) -> None:
        """Send away residents of components that do not run now, least recently used first."""
        for name in list(self._components):
            if name in (for_component, self._latest):
                continue  # what runs, or ran last, is not sent away for a guess
            for group in self._components[name].groups:
                if self._tier.room_bytes >= size_bytes:
                    return
                if group.stays and not group.users:
                    self._drop(group)

    def _is_allowed(self, component: str, more_bytes: int) -> bool:
        """Whether so much more may stay; residents that share the allowance give way for it."""
        allowance = self._allowances.get(component)
        if allowance is None:
            return True
        sharing = [name for name in self._components if self._allowances.get(name) is allowance]
        excess = allowance.kept_bytes + more_bytes - allowance.limit_bytes
        excess += sum(self.resident_bytes(name) for name in sharing)
        if self._latest in sharing:
            excess += self._components[self._latest].ring_bytes
        for name in sharing:
            if name in (component, self._latest):
                continue
            for group in self._components[name].groups:
                if excess <= 0:
                    return True
                if group.stays and not group.users:
                    excess -= group.size_bytes
                    self._drop(group)
        return excess <= 0

    def _wait_for_border_before_last(self) -> None:
        if len(self._borders) == FORWARDS_AHEAD:
            border = self._borders.popleft()
            if not border.query():
                self.counters.border_waits += 1
                border.synchronize()

    def _mark_border(self) -> None:
        border = self._accelerator.event()
        border.record(self._accelerator.compute_queue())
        self._borders.append(border)
