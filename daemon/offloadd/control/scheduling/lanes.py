"""The jobs that wait, kept in the order in which they are owed the device.

Invariants:
- A lane holds the jobs of one user's program, on one model, of one priority, oldest first.
- The lanes of a user on a model lie sorted by what their programs have used, then by their oldest
  job, so that to choose among hundreds of programs costs as much as among two. Whoever changes what
  a program has used says so (`reorder`).
- What a user has used is looked up when it is needed: it moves all of the user's lanes alike.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator

import msgspec

from offloadd.control.jobs.jobs import Wears
from offloadd.control.scheduling.shares import Shares


class Ticket(msgspec.Struct, frozen=True):
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
    wears: Wears = ()
    """Only jobs that wear the same share the device."""


class Lead(msgspec.Struct, frozen=True):
    """A job that has the device, and for how long: its user and program have used so much more."""

    ticket: Ticket
    used_s: float


Runnable = Callable[[Ticket], bool]
Rank = tuple[float, float, float]
"""What its user has used, what its program has, its age: the least is owed the device."""

_Lane = tuple[int, str, str, str]
_Place = tuple[float, float, str]
_Sorted = list[_Place]


class Lanes:
    """All jobs that wait; `shares` says what everybody has used."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._tickets: dict[_Lane, list[Ticket]] = {}
        self._lines: dict[int, dict[str, dict[str, _Sorted]]] = {}
        self._of_party: dict[tuple[str, str], dict[_Lane, _Place]] = {}

    def copy(self, shares: Shares) -> Lanes:
        """The same, to try things out on, ordered by other shares that say the same as yet."""
        copy = Lanes(shares)
        copy._tickets = {lane: tickets.copy() for lane, tickets in self._tickets.items()}
        copy._lines = {
            priority: {
                model: {user: places.copy() for user, places in of_model.items()}
                for model, of_model in line.items()
            }
            for priority, line in self._lines.items()
        }
        copy._of_party = {party: places.copy() for party, places in self._of_party.items()}
        return copy

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Let a job wait."""
        lane = _lane(ticket)
        tickets = self._tickets.setdefault(lane, [])
        insort(tickets, ticket, key=_age)
        if tickets[0] is ticket:
            self._place(lane)

    def remove(self, ticket: Ticket) -> None:
        """Take a job out that waits."""
        lane = _lane(ticket)
        tickets = self._tickets[lane]
        was_first = tickets[0] is ticket
        tickets.remove(ticket)
        if not tickets:
            del self._tickets[lane]
        if was_first:
            self._place(lane)

    def reorder(self, user: str, program: str) -> None:
        """The program has used more."""
        for lane in tuple(self._of_party.get((user, program), ())):
            self._place(lane)

    def priorities(self) -> list[int]:
        """Of the jobs that wait, the highest first."""
        return sorted(self._lines, reverse=True)

    def models(self, priority: int) -> Collection[str]:
        """The models of the jobs of one priority."""
        return self._lines.get(priority, {}).keys()

    def first(
        self, priority: int, models: Collection[str], runnable: Runnable, lead: Lead | None = None
    ) -> Ticket | None:
        """Of the jobs on some models that are `runnable`, the one that is owed the device most.

        With `lead`, as if the job that has the device had stopped now.
        """
        line = self._lines.get(priority, {})
        best: Ticket | None = None
        least: Rank = (float("inf"),) * 3
        for model in models:
            for user in line.get(model, ()):
                if self.user_s(user, lead) > least[0]:
                    continue
                for ticket in self._heads((priority, model, user), runnable, lead):
                    rank = self.rank(ticket, lead)
                    if best is None or rank < least:
                        best, least = ticket, rank
        return best

    def rank(self, ticket: Ticket, lead: Lead | None = None) -> Rank:
        """The least is owed the device."""
        program_s = self._shares.program_s(ticket.user, ticket.program)
        if lead is not None and _party(ticket) == _party(lead.ticket):
            program_s += lead.used_s
        return self.user_s(ticket.user, lead), program_s, ticket.submitted_s

    def user_s(self, user: str, lead: Lead | None) -> float:
        """What a user has used."""
        used_s = self._shares.user_s(user)
        return used_s + lead.used_s if lead is not None and lead.ticket.user == user else used_s

    def _heads(
        self, line: tuple[int, str, str], runnable: Runnable, lead: Lead | None
    ) -> Iterator[Ticket]:
        """The jobs of one user on one model among which the one is that is owed most."""
        priority, model, user = line
        leading = lead.ticket.program if lead is not None and lead.ticket.user == user else None
        bound = (float("inf"), float("inf"))
        for program_s, submitted_s, program in self._lines[priority][model][user]:
            if (program_s, submitted_s) > bound:
                break
            ticket = next(filter(runnable, self._tickets[(*line, program)]), None)
            if ticket is None:
                continue
            yield ticket
            # Whoever has the device stands further back than where its lane lies, which says
            # nothing of those behind it.
            if program != leading:
                bound = min(bound, (program_s, ticket.submitted_s))

    def _place(self, lane: _Lane) -> None:
        """Put a lane where it belongs now, or nowhere if it has become empty."""
        priority, model, user, program = lane
        by_model = self._lines.setdefault(priority, {})
        by_user = by_model.setdefault(model, {})
        places = by_user.setdefault(user, [])
        of_party = self._of_party.setdefault((user, program), {})
        before = of_party.pop(lane, None)
        if before is not None:
            del places[bisect_left(places, before)]
        tickets = self._tickets.get(lane)
        if tickets:
            now = (self._shares.program_s(user, program), tickets[0].submitted_s, program)
            insort(places, now)
            of_party[lane] = now
            return
        if not of_party:
            del self._of_party[(user, program)]
        if not places:
            del by_user[user]
            if not by_user:
                del by_model[model]
                if not by_model:
                    del self._lines[priority]


def _party(ticket: Ticket) -> tuple[str, str]:
    return ticket.user, ticket.program


def _lane(ticket: Ticket) -> _Lane:
    return ticket.priority, ticket.model, ticket.user, ticket.program


def _age(ticket: Ticket) -> float:
    return ticket.submitted_s
