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

One thread at a time may use an executor. Members of a sweep take turns at its gate (`sweep`): a
pass of several is one step here, which the first to enter begins and the last to leave ends, and in
which a group lingers until all have used it, since each waits before the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from offload_protocol.errors import OffloadError
from offloadd.offload.accelerator.interface import Accelerator, Event
from offloadd.offload.planning.allowances import Allowance
from offloadd.offload.planning.trace import StepTrace
from offloadd.offload.streaming.counters import Counters
from offloadd.offload.streaming.occupancy import Occupancy
from offloadd.offload.streaming.prediction import Prediction
from offloadd.offload.streaming.streamed import Streamed
from offloadd.offload.streaming.tier import DeviceTier
from offloadd.offload.streaming.transfers import Load
from offloadd.offload.sweep.gate import SweepGate

FORWARDS_AHEAD = 2
"""At a border the host waits for the border before last: one forward is queued while one runs."""


class Executor:
    """One ring and one set of resident groups for all components on a device.

    `on_border` is called at every entry of a root's forward, with the component's name, when
    nothing of that step has begun; what it raises ends the call, cleanly. `on_step_end` is called
    when a root's forward returned and none of its groups is in use.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        tier: DeviceTier,
        *,
        on_border: Callable[[str], None] = lambda component: None,
        on_step_end: Callable[[str], None] = lambda component: None,
    ) -> None:
        self.counters = Counters()
        self.on_border = on_border
        self.on_step_end = on_step_end
        self.prediction = Prediction()
        self.gate = SweepGate()
        self._accelerator = accelerator
        self._occupancy = Occupancy(tier, self.counters)
        self._lingering: Streamed | None = None
        self._borders: deque[Event] = deque()

    def add(self, component: str, groups: Iterable[Streamed]) -> None:
        """Take charge of a component's groups, all absent."""
        self._occupancy.add(component, groups)
        self.prediction.add(component)

    def remove(self, component: str) -> None:
        """Let a component go; its weights are absent afterwards."""
        self._occupancy.remove(component)
        if not self._occupancy.components:
            self._borders.clear()
        self.prediction.remove(component)

    def configure(self, component: str, keep: frozenset[int], ring_bytes: int) -> None:
        """Follow a plan from now on: which groups stay, and how large a ring the others need.

        The ring follows the component that runs. Raises OutOfMemory when the device does not give
        it; then groups still run, each in memory of its own.
        """
        self._end_lingering()
        self._occupancy.configure(component, keep, ring_bytes)

    def allow(self, component: str, allowance: Allowance | None) -> None:
        """Keep the component's weights, with those of all that share it, within an allowance."""
        self._occupancy.allow(component, allowance)

    def trace(self, component: str, trace: StepTrace | None) -> None:
        """Measure the component's steps into `trace`, or stop measuring them."""
        self._occupancy.components[component].trace = trace

    def resident_bytes(self, component: str) -> int:
        """Bytes of the component's groups that are on the device to stay."""
        return self._occupancy.resident_bytes(component)

    def make_room(self, size_bytes: int, component: str) -> None:
        """Send residents of other, idle components away until so much is free for this one."""
        self._occupancy.make_room(size_bytes, component)

    def drop_all(self) -> None:
        """Empty the device of all groups that are not in use, residents too."""
        self._let_linger_end()
        self._occupancy.drop_unused()

    def enter_root(self, component: str) -> None:
        """A border; raises what `on_border` raises."""
        while True:
            self.gate.wait_at_root(component)
            if not self.gate.has_begun:
                self._end_last_step(component)
            self.on_border(component)
            self.gate.on_border(component)
            if self.gate.may_enter(component):
                break  # otherwise it gave way at the border, and waits with others again
        if not self.gate.enter(component, self.prediction.known(component)):
            return
        self._mark_border()
        self._end_trace(self.prediction.running)
        self.prediction.begin(component)
        self._begin_step(component)
        self._prefetch()

    def leave_root(self, component: str) -> None:
        """The root's forward returned."""
        self.counters.forwards += 1
        if self.gate.leave_root(component):
            self._end_trace(component)
            self.prediction.finish(component)
            self._let_linger_end()
            self.on_step_end(component)
            self._prefetch()
        self.gate.wait_behind(component)

    def acquire(self, group: Streamed) -> None:
        """Bind the group's weights for what is put on the compute queue from now on.

        Raises StorageFailed or OutOfMemory; then the group is as absent as before.
        """
        # What lingers goes when another group is used, one that stays included.
        is_there = group.stays and not group.binding.converts and self._lingering is None
        is_new = self.gate.wait_at_group(group.component, group.index, is_there=is_there)
        if group.users:
            group.users += 1
            return
        if group is self._lingering and group.bound:
            self._lingering = None
            group.users = 1
            return
        has_freed = self._end_lingering()
        if is_new and has_freed and self._is_expected(group):
            self._prefetch()
        starts = is_new and self._predict_from(group)
        trace = self._trace_of(group.component)
        if trace is not None:
            trace.need(group.index)
        is_missing = group.load is None
        load = self._occupancy.fetch(group) if group.load is None else group.load
        self._occupancy.ahead.pop(group, None)
        if has_freed or is_missing or starts:
            # After this group has its memory, before anybody waits for its bytes.
            self._prefetch()
        if not group.bound:
            load = self._bind(group, load, is_missing)
        if trace is not None:
            trace.have(load)
        group.users = 1

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

    def _end_last_step(self, component: str) -> None:
        """Forget what a step left behind that did not end; then wait for the one before that."""
        self._let_linger_end()
        for group in self._occupancy.components[component].groups:
            if group.users:
                # An exception that runs no hooks (KeyboardInterrupt) ended the step before.
                group.users = 0
                self._leave(group)
        self._wait_for_border_before_last()

    def _is_expected(self, group: Streamed) -> bool:
        return next(self.prediction.upcoming(1), None) == (group.component, group.index)

    def _predict_from(self, group: Streamed) -> bool:
        """The next group of the step has come; says whether a step starts with it."""
        before = self.prediction.running
        starts = self.prediction.acquire(group.component, group.index)
        if starts:
            # A step begins that no root's forward announces; it also ends the one before.
            self._end_trace(before)
            self._begin_step(group.component)
        return starts

    def _trace_of(self, component: str) -> StepTrace | None:
        """Where to measure the step; one that several share says nothing about the plan."""
        trace = self._occupancy.components[component].trace
        return None if self.gate.sharers > 1 else trace

    def _begin_step(self, component: str) -> None:
        self._occupancy.use(component)
        trace = self._trace_of(component)
        if trace is not None:
            trace.begin()

    def _end_trace(self, component: str | None) -> None:
        components = self._occupancy.components
        trace = components[component].trace if component in components else None
        if trace is not None:
            trace.finish()

    def _bind(self, group: Streamed, load: Load, is_missing: bool) -> Load:
        """Wait for the group, with a second try where it was fetched ahead; gives its load."""
        try:
            self._await(group, load)
        except OffloadError:
            if is_missing:
                raise
            # That a guess failed, maybe long ago, says nothing about a read that is made now.
            load = self._occupancy.fetch(group)
            self._occupancy.ahead.pop(group, None)
            self._await(group, load)
        return load

    def _await(self, group: Streamed, load: Load) -> None:
        try:
            waited_s = load.wait()
        except OffloadError:
            self._occupancy.drop(group)
            raise
        self.counters.waited_s += waited_s
        if waited_s and self._accelerator.has_dma:
            self.counters.host_syncs += 1
        group.binding.present(load.region.tensor)
        group.bound = True

    def _leave(self, group: Streamed) -> None:
        """A step is over with the group: what passes gives its memory on."""
        if not group.stays:
            self._occupancy.drop(group)
        elif group.binding.converts:
            group.binding.absent()
            group.bound = False

    def _let_linger_end(self) -> None:
        if self._end_lingering():
            self._prefetch()

    def _end_lingering(self) -> bool:
        group, self._lingering = self._lingering, None
        if group is None or not group.bound:
            return False  # or it had to give its memory up meanwhile
        self._leave(group)
        return True

    def _prefetch(self) -> None:
        """Fetch ahead in the predicted order, as far as there is memory for it."""
        occupancy = self._occupancy
        seen: set[Streamed] = set()
        for name, index in self.prediction.upcoming(occupancy.group_count):
            group = occupancy.components[name].groups[index]
            seen.add(group)
            if group.load is not None:
                continue
            try:
                if not occupancy.fetch_ahead(group, seen):
                    return
            except OffloadError:
                return  # whoever needs the group will be told

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
