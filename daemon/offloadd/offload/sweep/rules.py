"""Who computes next in a sweep: a pure state machine, to which the time is handed in.

A sweep's members compute one at a time. A *pass* is one walk through a swept component's groups
for all members that take part in it; between passes each member does its *own work* (encoding,
scheduler steps, decoding). The rules, in this order:

1. While a pass is under way it alone goes on: own work never lies between a group's coming and its
   going. Of its members the one furthest behind in the component's order computes (the entry of
   the forward comes before all groups); at equal places the one that computed last goes on, which
   saves a switch, then whoever came first. So a group is done with for all members before any of
   them needs the next one, and a member in another order waits, or is waited for, but is never
   stuck: it brings what it needs itself.
2. Between passes own work goes first, in turns from border to border, until all members stand at a
   root: more of them share the pass, and what it needs first is fetched meanwhile.
3. Own work holds up those who stand at a root for no longer than their component's last pass took:
   after that a pass begins as soon as own work comes to a border. So the wait between two passes is
   at most as long as a pass, plus the longest stretch between two borders of somebody's own work.
   Before a component's first pass there is no such measure, and all are waited for.
4. A pass is for the component whose root a member has waited at longest, and takes everybody who
   stands there, the longest waiting first, up to the component's limit.

A member that ends, or is seen outside of the pass (its forward raised), is waited for no longer.
One that is hurried (it is to stop) goes before all others between passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from offloadd.offload.sweep.places import ENTRY, Place


class _At(Enum):
    OWN_WORK = auto()
    ROOT = auto()
    GROUP = auto()
    BEHIND_PASS = auto()


@dataclass(slots=True)
class _Standing:
    """`since` counts arrivals, so that the lowest came first."""

    at: _At
    since: int
    since_s: float
    component: str = ""
    place: Place = ENTRY
    used_s: float = 0.0
    is_hurried: bool = False
    is_alone: bool = False


@dataclass(slots=True)
class _Pass:
    """`going` are those of `sharing` that have not left it; the first to enter makes it begin.

    `front` is the furthest place that any of them has come to.
    """

    component: str
    sharing: tuple[str, ...]
    going: set[str]
    begun_s: float
    has_begun: bool = False
    front: Place = ENTRY


@dataclass(slots=True)
class SweepRules:
    """The members of one sweep, by name. `limit` says how many may share a component's pass now.

    Exactly the member that `choose` gave last computes; it alone makes reports, and each report is
    followed by a `choose`. Joining is possible at any time.
    """

    limit: Callable[[str], int] = lambda component: 1 << 30
    current: str | None = None
    passes: int = 0
    shared_passes: int = 0
    _standings: dict[str, _Standing] = field(default_factory=dict)
    _pass: _Pass | None = None
    _pass_s: dict[str, float] = field(default_factory=dict)
    _pass_ended_s: float = 0.0
    _arrivals: int = 0
    _charged_s: float = 0.0

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._standings)

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass is under way that somebody still takes part in."""
        return self._pass is not None and bool(self._pass.going)

    @property
    def sharers(self) -> int:
        """With how many members the pass under way began; 1 between passes."""
        return 1 if self._pass is None else len(self._pass.sharing)

    @property
    def has_begun(self) -> bool:
        """Whether somebody has entered the pass under way."""
        return self._pass is not None and self._pass.has_begun

    def join(self, member: str, now_s: float, *, is_alone: bool = False) -> None:
        """A new member, who begins with own work; with `is_alone` it shares no pass.

        Raises ValueError for a name in use.
        """
        if member in self._standings:
            raise ValueError(f"{member!r} takes part already")
        self._standings[member] = arrived = self._arrived(_At.OWN_WORK, now_s)
        arrived.is_alone = is_alone

    def end(self, member: str, now_s: float) -> float:
        """A member has ended, anyhow; gives the seconds that it is charged with."""
        self._charge(now_s)
        self._part_from_pass(member)
        return self._standings.pop(member).used_s

    def own_border(self, member: str, now_s: float) -> None:
        """A member is between two pieces of own work."""
        self._move(member, _At.OWN_WORK, now_s)

    def hurry(self, member: str, is_hurried: bool = True) -> None:
        """Let a member, if it has not ended, be the first to go on between passes from now on."""
        if member in self._standings:
            self._standings[member].is_hurried = is_hurried

    def may_enter(self, member: str) -> bool:
        """Whether the pass under way is one that the member is to enter."""
        return self._pass is not None and member in self._pass.going

    def at_root(self, member: str, component: str, now_s: float) -> None:
        """A member is about to enter a swept component."""
        self._move(member, _At.ROOT, now_s, component)

    def enter(self, member: str) -> bool:
        """The current member enters the pass for good; says whether it is the first."""
        assert self._pass is not None
        is_first, self._pass.has_begun = not self._pass.has_begun, True
        self._standings[member].at = _At.GROUP
        return is_first

    def at_group(self, member: str, component: str, place: Place) -> bool:
        """A member needs a group; False where it is in no pass of that component, and not held."""
        standing = self._standings[member]
        if standing.at is not _At.GROUP or standing.component != component:
            return False
        standing.place = place
        return True

    def leads(self, member: str) -> bool:
        """Whether the member, at a group, is the first of its pass to come so far."""
        place = self._standings[member].place
        if self._pass is None or place <= self._pass.front:
            return False
        self._pass.front = place
        return True

    def leave_root(self, member: str, component: str, now_s: float) -> bool:
        """A member has left a swept component; says whether it is the last of its pass."""
        standing = self._standings[member]
        if standing.at is not _At.GROUP or standing.component != component:
            return True
        self._move(member, _At.BEHIND_PASS, now_s, component)
        return not self.is_in_pass

    def choose(self, now_s: float, *, pause: bool = False) -> str | None:
        """Who computes from now on; None if nobody is left, or, with `pause`, between passes."""
        self._charge(now_s)
        if self._pass is not None and not self.is_in_pass:
            self._end_pass(now_s)
        if self._pass is None and not self._hurried and not pause:
            self._begin_pass(now_s)
        if self._pass is not None:
            self.current = min(self._pass.going, key=self._rank)
        elif self._hurried:
            self.current = self._hurried[0]
        else:
            self.current = None if pause else self._own_work_next()
        return self.current

    def used_s(self, member: str) -> float:
        """Seconds of the device charged to a member so far.

        Own work counts in full; the time of a pass is split evenly among those who take part in it,
        since what takes its time is the transfer.
        """
        return self._standings[member].used_s

    @property
    def _hurried(self) -> list[str]:
        return [name for name, one in self._standings.items() if one.is_hurried]

    def _part_from_pass(self, member: str) -> None:
        if self._pass is not None:
            self._pass.going.discard(member)

    def _rank(self, member: str) -> tuple[Place, bool, int]:
        standing = self._standings[member]
        return standing.place, member != self.current, standing.since

    def _begin_pass(self, now_s: float) -> None:
        waiting = [name for name, one in self._standings.items() if one.at is _At.ROOT]
        if not waiting:
            return
        waiting.sort(key=lambda name: self._standings[name].since)
        first = self._standings[waiting[0]]
        if self._own_work_next() is not None and not self._is_over(first, now_s):
            return
        members = waiting[:1]
        if not first.is_alone:
            sharing = [name for name in waiting if self._may_share(first, self._standings[name])]
            members = sharing[: max(self.limit(first.component), 1)]
        self._pass = _Pass(first.component, tuple(members), set(members), now_s)
        self.passes += 1
        self.shared_passes += len(members) > 1

    def _may_share(self, first: _Standing, other: _Standing) -> bool:
        return other.component == first.component and not other.is_alone

    def _is_over(self, waiting: _Standing, now_s: float) -> bool:
        """Whether those at the root have waited for own work as long as they have to."""
        patience_s = self._pass_s.get(waiting.component)
        held_s = now_s - max(waiting.since_s, self._pass_ended_s)
        return patience_s is not None and held_s >= patience_s

    def _end_pass(self, now_s: float) -> None:
        assert self._pass is not None
        self._pass_s[self._pass.component] = now_s - self._pass.begun_s
        self._pass, self._pass_ended_s = None, now_s
        for standing in self._standings.values():
            if standing.at is _At.BEHIND_PASS:
                standing.at = _At.OWN_WORK

    def _own_work_next(self) -> str | None:
        at_work = [name for name, one in self._standings.items() if one.at is _At.OWN_WORK]
        return min(at_work, key=lambda name: self._standings[name].since, default=None)

    def _move(self, member: str, at: _At, now_s: float, component: str = "") -> None:
        self._part_from_pass(member)
        before = self._standings[member]
        self._standings[member] = arrived = self._arrived(at, now_s, component)
        arrived.used_s, arrived.is_alone = before.used_s, before.is_alone
        arrived.is_hurried = before.is_hurried

    def _arrived(self, at: _At, now_s: float, component: str = "") -> _Standing:
        self._arrivals += 1
        return _Standing(at, self._arrivals, now_s, component)

    def _charge(self, now_s: float) -> None:
        elapsed_s, self._charged_s = now_s - self._charged_s, now_s
        if self.current is None:
            return
        sharing = self._pass.sharing if self._pass is not None else (self.current,)
        sharing = tuple(name for name in sharing if name in self._standings)
        for name in sharing:
            self._standings[name].used_s += elapsed_s / len(sharing)
