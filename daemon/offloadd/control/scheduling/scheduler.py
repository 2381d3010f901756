"""Which waiting job has the next turn: a pure queue, to which times and costs are handed in.

The rule, in this order:
1. Only jobs that can run now take part.
2. The highest priority goes first.
3. The user who has used the device least is owed it, then that user's program that has (see
   `shares`), and of its jobs the oldest.
4. Where that means another model than the present one, jobs on the present one go first while its
   turn lasts: `SWITCH_WORTH` times what a switch costs, so that switching takes at most a fifth
   of the time, but never longer than `model_turn_s`. A switch that costs nothing waits for nothing.

A running job is measured by the same rule, as if it had stopped now: where the rule gives the
device to another user or program, and the job has had it for `LEAST_TURN_S`, it is to give way.
Jobs of one program do not interrupt each other, but for a higher priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass

from offload_protocol.errors import Busy
from offloadd.control.scheduling.shares import Shares

SWITCH_WORTH = 5.0

LEAST_TURN_S = 0.1
"""How long a job has the device at least, before another of its priority may take it."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job in the queue. `expected_s` is how long it will have the device from now on.

    With `is_alone` it shares the device with no other.
    """

    job: str
    user: str
    program: str
    model: str
    submitted_s: float
    priority: int = 0
    deadline_s: float | None = None
    size_bytes: int = 0
    expected_s: float = 0.0
    is_alone: bool = False
    shares_nothing: bool = False
    """It goes on beside no other, and may be parked beside others."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the queue may hold, and how long a model may be preferred."""

    limit: int
    per_user_limit: int
    max_bytes: int
    model_turn_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job stands in the queue: 1 is next; `starts_in_s` is an estimate."""

    job: str
    position: int
    starts_in_s: float


@dataclass(frozen=True, slots=True)
class _Turn:
    model: str | None = None
    since_s: float = 0.0


_Lanes = dict[tuple[int, str, str, str], list[Ticket]]


Runnable = Callable[[Ticket], bool]
Rank = Callable[[Ticket], tuple[float, ...]]


class Scheduler:
    """The queue of one device. `switch_s` is what it takes to make a model the present one."""

    def __init__(self, bounds: Bounds, switch_s: Callable[[str], float]) -> None:
        self._bounds = bounds
        self._switch_s = switch_s
        self._waiting: dict[str, Ticket] = {}
        self._running: dict[str, Ticket] = {}
        self._aside: dict[str, Ticket] = {}
        self._lanes: _Lanes = {}
        self._by_model: dict[str, int] = {}
        self._shares = Shares()
        self._turn = self._turn_before = _Turn()
        self._waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job: str) -> bool:
        return job in self._waiting

    @property
    def models(self) -> Collection[str]:
        """The models that jobs wait for."""
        return self._by_model.keys()

    def add(self, ticket: Ticket, retry_after_s: float) -> None:
        """Queue a job; raises `Busy`, with `retry_after_s` for the client, where there is no room.

        An empty queue takes a request of any size.
        """
        of_user = sum(other.user == ticket.user for other in self._waiting.values())
        full = ""
        if len(self._waiting) >= self._bounds.limit:
            full = f"{len(self._waiting)} jobs wait already"
        elif of_user >= self._bounds.per_user_limit:
            full = f"{of_user} jobs of this user wait already"
        elif self._waiting and self._waiting_bytes + ticket.size_bytes > self._bounds.max_bytes:
            full = f"the requests that wait hold {self._waiting_bytes} bytes already"
        if full:
            raise Busy(
                f"the queue is full: {full}",
                hint=f"try again in {retry_after_s:.0f} s",
                details={"retry_after_s": retry_after_s, "depth": len(self._waiting)},
            )
        self.restore(ticket)

    def restore(self, ticket: Ticket) -> None:
        """Queue a job that was accepted before, whatever waits already."""
        self._waiting[ticket.job] = ticket
        self._waiting_bytes += ticket.size_bytes
        self._shares.enter(ticket.user, ticket.program)
        self._by_model[ticket.model] = self._by_model.get(ticket.model, 0) + 1
        insort(self._lanes.setdefault(_lane(ticket), []), ticket, key=_age)

    def remove(self, job: str) -> bool:
        """Take a job out; False where it does not wait."""
        ticket = self._waiting.get(job)
        if ticket is not None:
            self._take_out(ticket)
            self._shares.leave(ticket.user, ticket.program)
        return ticket is not None

    def expired(self, now_s: float) -> list[str]:
        """The jobs whose time to wait is over; they still wait until they are removed."""
        return [
            ticket.job
            for ticket in self._waiting.values()
            if ticket.deadline_s is not None and ticket.deadline_s <= now_s
        ]

    def model_left(self, model: str) -> None:
        """The model is no longer in memory, so nothing is gained by preferring it."""
        if self._turn.model == model:
            self._turn = _Turn()

    def start_next(self, now_s: float, runnable: Runnable) -> Ticket | None:
        """Take out the job that has the device now, or None where none is `runnable`."""
        heads = self._heads(runnable)
        if not heads:
            return None
        ticket = self._choose(heads, _rank(self._shares), self._turn, now_s)
        self._take_out(ticket)
        self._running[ticket.job] = ticket
        self._shares.serve(ticket.user, ticket.program)
        self._turn_before = self._turn
        if ticket.model != self._turn.model:
            self._turn = _Turn(ticket.model, now_s)
        return ticket

    def is_owed(self, now_s: float, used_s: float, runnable: Runnable) -> bool:
        """Whether the running job, `used_s` into its turn, is to give way to another's."""
        running = next(iter(self._running.values()), None)
        heads = self._heads(runnable)
        if running is None or not heads:
            return False
        if max(ticket.priority for ticket in heads) > running.priority:
            return True
        if used_s < LEAST_TURN_S:
            return False
        rank = _rank(self._shares, running, used_s)
        chosen = self._choose([*heads, running], rank, self._turn, now_s)
        return (chosen.user, chosen.program) != (running.user, running.program)

    def set_aside(self, job: str) -> None:
        """A job that was started does not need the device yet: it is as if it had not been."""
        self._aside[job] = self._running.pop(job)
        self._turn = self._turn_before

    def put_back(self, ticket: Ticket, used_s: float) -> None:
        """A job that was started waits for the device again, and has used it for so long."""
        self.restore(ticket)
        before = self._running.pop(ticket.job, None) or self._aside.pop(ticket.job)
        if used_s:
            self._shares.charge(before.user, before.program, used_s)
        self._shares.leave(before.user, before.program)

    def stopped(self, job: str, used_s: float) -> None:
        """A job that was started is no longer there, and has used the device for so long."""
        ticket = self._running.pop(job, None) or self._aside.pop(job, None)
        if ticket is not None:
            self._shares.charge(ticket.user, ticket.program, used_s)
            self._shares.leave(ticket.user, ticket.program)

    def places(self, now_s: float, busy_s: float = 0.0) -> list[Place]:
        """The waiting jobs in the order of their start, if nothing else comes.

        `busy_s` is how long the device will still be in use.
        """
        lanes: _Lanes = {key: lane[::-1] for key, lane in self._lanes.items()}
        shares, turn, time_s = self._shares.copy(), self._turn, now_s + busy_s
        for running in self._running.values():
            shares.charge(running.user, running.program, running.expected_s)
        places: list[Place] = []
        while lanes:
            heads = [lane[-1] for lane in lanes.values()]
            ticket = self._choose(heads, _rank(shares), turn, time_s)
            places.append(Place(ticket.job, len(places) + 1, time_s - now_s))
            shares.serve(ticket.user, ticket.program)
            used_s = ticket.expected_s
            if ticket.model != turn.model:
                turn = _Turn(ticket.model, time_s)
                used_s += self._switch_s(ticket.model)
            shares.charge(ticket.user, ticket.program, used_s)
            time_s += used_s
            _shorten(lanes, ticket)
        return places

    def _heads(self, runnable: Runnable) -> list[Ticket]:
        """The oldest job that can run of each user's program, by model and priority."""
        heads = (next(filter(runnable, lane), None) for lane in self._lanes.values())
        return [ticket for ticket in heads if ticket is not None]

    def _choose(self, heads: list[Ticket], rank: Rank, turn: _Turn, now_s: float) -> Ticket:
        highest = max(ticket.priority for ticket in heads)
        heads = [ticket for ticket in heads if ticket.priority == highest]
        owed = min(heads, key=rank)
        near = [ticket for ticket in heads if ticket.model == turn.model]
        if not near or owed.model == turn.model:
            return owed
        turn_s = min(SWITCH_WORTH * self._switch_s(owed.model), self._bounds.model_turn_s)
        return min(near, key=rank) if now_s - turn.since_s < turn_s else owed

    def _take_out(self, ticket: Ticket) -> None:
        del self._waiting[ticket.job]
        self._waiting_bytes -= ticket.size_bytes
        self._by_model[ticket.model] -= 1
        if not self._by_model[ticket.model]:
            del self._by_model[ticket.model]
        lane = self._lanes[_lane(ticket)]
        lane.remove(ticket)
        if not lane:
            del self._lanes[_lane(ticket)]


def _rank(shares: Shares, running: Ticket | None = None, used_s: float = 0.0) -> Rank:
    """Who is owed most comes first; the party of `running` has used the device `used_s` longer."""

    def rank(ticket: Ticket) -> tuple[float, ...]:
        user_s, program_s = shares.rank(ticket.user, ticket.program)
        if running is not None and ticket.user == running.user:
            user_s += used_s
            program_s += used_s if ticket.program == running.program else 0.0
        return user_s, program_s, ticket.submitted_s

    return rank


def _lane(ticket: Ticket) -> tuple[int, str, str, str]:
    return ticket.priority, ticket.model, ticket.user, ticket.program


def _age(ticket: Ticket) -> float:
    return ticket.submitted_s


def _shorten(lanes: _Lanes, ticket: Ticket) -> None:
    key = _lane(ticket)
    lanes[key].pop()
    if not lanes[key]:
        del lanes[key]
