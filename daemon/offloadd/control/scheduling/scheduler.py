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

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from offload_protocol.errors import Busy
from offloadd.control.scheduling.lanes import Lanes, Lead, Runnable
from offloadd.control.scheduling.lanes import Ticket as Ticket
from offloadd.control.scheduling.shares import Shares

SWITCH_WORTH = 5.0

LEAST_TURN_S = 0.1
"""How long a job has the device at least, before another of its priority may take it."""


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


class Scheduler:
    """The queue of one device. `switch_s` is what it takes to make a model the present one."""

    def __init__(self, bounds: Bounds, switch_s: Callable[[str], float]) -> None:
        self._bounds = bounds
        self._switch_s = switch_s
        self._waiting: dict[str, Ticket] = {}
        self._running: dict[str, Ticket] = {}
        self._aside: dict[str, Ticket] = {}
        self._of_user: Counter[str] = Counter()
        self._by_model: dict[str, int] = {}
        self._shares = Shares()
        self._lanes = Lanes(self._shares)
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
        of_user = self._of_user[ticket.user]
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
        self._of_user[ticket.user] += 1
        self._lanes.add(ticket)

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
        ticket: Ticket | None
        if len(self._waiting) == 1:
            # It needs no comparing, as in the usual case that nobody waits.
            (ticket,) = self._waiting.values()
            ticket = ticket if runnable(ticket) else None
        else:
            ticket = _choose(self._lanes, runnable, self._turn, now_s, self._turn_s)
        if ticket is None:
            return None
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
        if running is None:
            return False
        lanes = self._lanes
        for priority in lanes.priorities():
            if priority <= running.priority:
                break
            if lanes.first(priority, lanes.models(priority), runnable) is not None:
                return True
        if used_s < LEAST_TURN_S:
            return False
        lead = Lead(running, used_s)
        chosen = _choose(lanes, runnable, self._turn, now_s, self._turn_s, lead)
        return chosen is not None and (chosen.user, chosen.program) != (
            running.user,
            running.program,
        )

    def set_aside(self, job: str) -> None:
        """A job that was started does not need the device yet: it is as if it had not been."""
        self._aside[job] = self._running.pop(job)
        self._turn = self._turn_before

    def put_back(self, ticket: Ticket, used_s: float) -> None:
        """A job that was started waits for the device again, and has used it for so long."""
        self.restore(ticket)
        before = self._running.pop(ticket.job, None) or self._aside.pop(ticket.job)
        if used_s:
            self._charge(before, used_s)
        self._shares.leave(before.user, before.program)

    def stopped(self, job: str, used_s: float) -> None:
        """A job that was started is no longer there, and has used the device for so long."""
        ticket = self._running.pop(job, None) or self._aside.pop(job, None)
        if ticket is not None:
            self._charge(ticket, used_s)
            self._shares.leave(ticket.user, ticket.program)

    def places(self, now_s: float, busy_s: float = 0.0) -> list[Place]:
        """The waiting jobs in the order of their start, if nothing else comes.

        `busy_s` is how long the device will still be in use.
        """
        shares, turn, time_s = self._shares.copy(), self._turn, now_s + busy_s
        lanes = self._lanes.copy(shares)
        for running in self._running.values():
            shares.charge(running.user, running.program, running.expected_s)
            lanes.reorder(running.user, running.program)
        places: list[Place] = []
        while (ticket := _choose(lanes, _any, turn, time_s, self._turn_s)) is not None:
            places.append(Place(ticket.job, len(places) + 1, time_s - now_s))
            lanes.remove(ticket)
            shares.serve(ticket.user, ticket.program)
            used_s = ticket.expected_s
            if ticket.model != turn.model:
                turn = _Turn(ticket.model, time_s)
                used_s += self._switch_s(ticket.model)
            shares.charge(ticket.user, ticket.program, used_s)
            lanes.reorder(ticket.user, ticket.program)
            time_s += used_s
        return places

    def _turn_s(self, model: str) -> float:
        """How long the present model is preferred to another one."""
        return min(SWITCH_WORTH * self._switch_s(model), self._bounds.model_turn_s)

    def _charge(self, ticket: Ticket, used_s: float) -> None:
        self._shares.charge(ticket.user, ticket.program, used_s)
        self._lanes.reorder(ticket.user, ticket.program)

    def _take_out(self, ticket: Ticket) -> None:
        del self._waiting[ticket.job]
        self._waiting_bytes -= ticket.size_bytes
        self._by_model[ticket.model] -= 1
        if not self._by_model[ticket.model]:
            del self._by_model[ticket.model]
        self._of_user[ticket.user] -= 1
        if not self._of_user[ticket.user]:
            del self._of_user[ticket.user]
        self._lanes.remove(ticket)


def _choose(
    lanes: Lanes,
    runnable: Runnable,
    turn: _Turn,
    now_s: float,
    turn_s: Callable[[str], float],
    lead: Lead | None = None,
) -> Ticket | None:
    """The job that has the device now.

    With `lead`, that job takes part as if it waited, and others of its priority alone.
    """
    priorities = lanes.priorities() if lead is None else [lead.ticket.priority]
    for priority in priorities:
        owed = lanes.first(priority, lanes.models(priority), runnable, lead)
        if lead is not None:
            owed = _before(lanes, owed, lead)
        if owed is None:
            continue
        if owed.model == turn.model or turn.model is None:
            return owed
        near = lanes.first(priority, (turn.model,), runnable, lead)
        if lead is not None and lead.ticket.model == turn.model:
            near = _before(lanes, near, lead)
        if near is None or now_s - turn.since_s >= turn_s(owed.model):
            return owed
        return near
    return None


def _before(lanes: Lanes, ticket: Ticket | None, lead: Lead) -> Ticket:
    """Who is owed more: a job that waits, or the one that has the device."""
    if ticket is None or lanes.rank(lead.ticket, lead) < lanes.rank(ticket, lead):
        return lead.ticket
    return ticket


def _any(ticket: Ticket) -> bool:
    return True
