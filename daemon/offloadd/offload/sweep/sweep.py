"""Jobs that share each pass of the ring: every group that comes computes for all of them.

A `SweepRoom` is made by `Engine.sweep` for the components that are shared (denoisers; whatever is
streamed and entered by its forward), and runs any number of *members*, each a callable in a thread
of its own that uses the engine's modules as if it were alone.

    room = engine.sweep("model/transformer")
    drawn = room.join("job 1", lambda: pipeline(...), on_border=look_whether_to_stop)
    while room.run(until=another_is_owed_the_device):
        ...  # all members stand at borders: the owner may use the engine for something else
    picture = drawn.result()

The contract:
- One thread at a time uses the engine and computes at all: the *owner*, which is the thread that
  calls `run`, or one member. Who does has the baton; the others wait. `sweep_rules` says who gets
  it when, and how long anybody waits.
- The baton changes hands where a root's forward is entered or left and, inside a swept component,
  before a group that is not on the device to stay. It comes back to the owner only between passes:
  when `until()` is true there (it is asked by whoever has the baton, in that thread), or when all
  members have ended.
- `join` may be called at any time, by any thread; a member that joins while `run` is under way
  begins as soon as the rules let it. A member ends by returning or raising, which leaves the
  others as they are; its future has what came of it before anybody else gets the baton.
- `on_border` is called in the member's thread at each entry of an attached module's forward, after
  the engine's own; what either raises (a cancel) ends that member's forward alone.
- `switch.resume()` is called in the member's thread each time it gets the baton, `switch.suspend()`
  before it gives it on: state that the threads share (the global random generators) is kept apart
  so. The owner's is kept by the room in the same way. What torch keeps by thread is set in each
  member's: no gradients, and device and queue as in the thread that made the room.
- Numbers are those of each member alone, bit for bit, whatever order of groups anybody takes: the
  order decides only what is loaded how often.
- Not for modules that keep state of a forward on themselves across groups (caches between steps),
  and a call that changes them for its length (by a scale for adapters) attends with `is_alone`.
- While several share a pass nothing is measured for the plan, which is then another than for one
  job alone (`planning.sharing`), and a component that has no plan yet
  (`Engine.is_planned`) is passed by one member at a time, so that it gets one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

from offloadd.offload.sweep.gate import SweepGate
from offloadd.offload.sweep.places import PlaceCursor
from offloadd.offload.sweep.rules import SweepRules

MOST_MEMBERS = 1 << 20
"""As many as there are."""

Result = TypeVar("Result")


class Switch(Protocol):
    """State of the process that each member is to have for itself."""

    def suspend(self) -> None:
        """Put the state away; somebody else goes on."""
        ...

    def resume(self) -> None:
        """Have the state as it was at `suspend`, or as it was when this was made."""
        ...


class SweepRoom:
    """See the module. `thread_state` gives the context in which each member's thread works."""

    def __init__(
        self,
        gate: SweepGate,
        components: Collection[str],
        *,
        limit: Callable[[str], int],
        make_switch: Callable[[], Switch],
        thread_state: Callable[[], AbstractContextManager[Any]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._components = frozenset(components)
        self._rules = SweepRules(limit=limit)
        self._make_switch = make_switch
        self._thread_state = thread_state
        self._clock = clock
        self._lock = threading.Lock()
        self._holder: _Member | None = None
        self._owner_has_baton = threading.Condition(self._lock)
        self._members: dict[str, _Member] = {}
        self._until: Callable[[], bool] = lambda: False
        self.on_arrival: Callable[[], None] = lambda: None
        """Called by whoever has just become a member, before it waits."""

    @property
    def members(self) -> tuple[str, ...]:
        """Who has joined and not ended."""
        with self._lock:
            return self._rules.members

    @property
    def passes(self) -> int:
        """How many passes have begun."""
        return self._rules.passes

    def used_s(self, name: str) -> float:
        """Seconds of the device charged to a member that has not ended (`SweepRules.used_s`)."""
        with self._lock:
            return self._rules.used_s(name)

    @contextmanager
    def attending(
        self,
        name: str,
        *,
        on_border: Callable[[str], None] = lambda component: None,
        switch: Switch | None = None,
        is_alone: bool = False,
    ) -> Iterator[None]:
        """Let the calling thread be a member inside this context, which it enters with the baton.

        At a border it may also leave the context, and enter it again later. With `is_alone` it
        shares no pass. Without a `switch` it has the room's kind, with the state that the process
        has now. Raises ValueError for the name of a member that has not ended.
        """
        with self._attend(self._enrol(name, on_border, switch, is_alone)):
            yield

    def join(
        self,
        name: str,
        work: Callable[[], Result],
        *,
        on_border: Callable[[str], None] = lambda component: None,
        switch: Switch | None = None,
    ) -> Future[Result]:
        """Let `work` attend in a new thread; raises as `attending` does.

        What `work` raises lives, with all its frames, for as long as the future does.
        """
        member = self._enrol(name, on_border, switch)
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()

        def live() -> None:
            with self._attend(member):
                try:
                    with self._thread_state():
                        future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - raised where it is asked for
                    future.set_exception(error)

        # A daemon: a process that ends does not wait for members whom nobody gives the baton.
        threading.Thread(target=live, name=f"sweep {name}", daemon=True).start()
        return future

    def hurry(self, name: str) -> None:
        """Let a member, which is to end, come to its border before all others between passes.

        Its `on_border` is called there. Where the owner has the baton, that is in the next `run`,
        even one that is to come back at once. Any thread may call this.
        """
        with self._lock:
            self._rules.hurry(name)

    def run(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Give the baton to the members until it comes back; says whether any has not ended."""
        self._until = until
        chosen = self._choose()
        if chosen is not None:
            switch = self._make_switch()
            switch.suspend()
            self._give(chosen)
            with self._lock:
                self._owner_has_baton.wait_for(lambda: self._holder is None)
            switch.resume()
        return bool(self.members)

    def _enrol(
        self,
        name: str,
        on_border: Callable[[str], None],
        switch: Switch | None,
        is_alone: bool = False,
    ) -> _Member:
        member = _Member(self, name, on_border, switch or self._make_switch())
        with self._lock:
            self._rules.join(name, self._clock(), is_alone=is_alone)
            self._members[name] = member
        self.on_arrival()
        return member

    @contextmanager
    def _attend(self, member: _Member) -> Iterator[None]:
        self._await_baton(member)
        self._gate.member = member
        try:
            yield
        finally:
            self._gate.member = None
            with self._lock:
                self._rules.end(member.name, self._clock())
                del self._members[member.name]
            self._give(self._choose())

    def _pass_on(self, member: _Member) -> None:
        """The member has reported where it stands: wait until it is the one to go on."""
        chosen = self._choose()
        if chosen is member:
            return
        member.switch.suspend()
        self._give(chosen)
        self._await_baton(member)

    def _choose(self) -> _Member | None:
        """Who is next; asked by whoever has the baton, so that nothing changes but who joins."""
        is_asked = not self._rules.is_in_pass and self._until()
        with self._lock:
            name = self._rules.choose(self._clock(), pause=is_asked)
            return None if name is None else self._members[name]

    def _give(self, chosen: _Member | None) -> None:
        with self._lock:
            self._holder = chosen
            waiting = self._owner_has_baton if chosen is None else chosen.has_baton
            waiting.notify_all()

    def _await_baton(self, member: _Member) -> None:
        with self._lock:
            member.has_baton.wait_for(lambda: self._holder is member)
        member.switch.resume()


class _Member:
    """One member's side of the gate."""

    def __init__(
        self, room: SweepRoom, name: str, on_border: Callable[[str], None], switch: Switch
    ) -> None:
        self.name = name
        self.on_border = on_border
        self.switch = switch
        self.has_baton = threading.Condition(room._lock)
        self._room = room
        self._cursor = PlaceCursor()

    @property
    def sharers(self) -> int:
        return self._room._rules.sharers

    @property
    def has_begun(self) -> bool:
        return self._room._rules.has_begun

    def wait_at_root(self, component: str) -> None:
        room = self._room
        with room._lock:
            if component in room._components:
                room._rules.at_root(self.name, component, room._clock())
            else:
                room._rules.own_border(self.name, room._clock())
        room._pass_on(self)

    def may_enter(self, component: str) -> bool:
        room = self._room
        if component not in room._components:
            return True
        with room._lock:
            room._rules.hurry(self.name, False)
            return room._rules.may_enter(self.name)

    def enter(self, component: str, known: Sequence[int]) -> bool:
        if component not in self._room._components:
            return True
        self._cursor = PlaceCursor(known)
        with self._room._lock:
            return self._room._rules.enter(self.name)

    def wait_at_group(self, component: str, group: int, *, is_there: bool) -> bool:
        room = self._room
        if component not in room._components:
            return True
        place = self._cursor.acquire(group)
        with room._lock:
            if not room._rules.at_group(self.name, component, place):
                return True
        if not is_there:
            room._pass_on(self)
        with room._lock:
            return room._rules.leads(self.name)

    def leave_root(self, component: str) -> bool:
        room = self._room
        if component not in room._components:
            return True
        with room._lock:
            return room._rules.leave_root(self.name, component, room._clock())

    def wait_behind(self, component: str) -> None:
        if component in self._room._components:
            self._room._pass_on(self)
