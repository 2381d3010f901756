"""The order of those who wait, against the same by looking at all of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from offloadd.control.scheduling.lanes import Lanes, Lead, Rank, Runnable, Ticket
from offloadd.control.scheduling.shares import Shares

PARTIES = [(user, program) for user in "ab" for program in "pqr"]

tickets = st.builds(
    lambda party, model, priority: (*party, model, priority),
    st.sampled_from(PARTIES),
    st.sampled_from("MN"),
    st.integers(0, 1),
)
steps = st.one_of(
    st.tuples(st.just("add"), tickets),
    st.tuples(st.just("remove"), st.integers(0, 40)),
    st.tuples(st.just("charge"), st.tuples(st.sampled_from(PARTIES), st.integers(1, 3))),
)


Step = tuple[str, Any]


class Line:
    """Lanes, and the same jobs in a list."""

    def __init__(self) -> None:
        self.shares = Shares()
        self.lanes = Lanes(self.shares)
        self.waiting: list[Ticket] = []
        self._count = 0
        for user, program in PARTIES:
            self.shares.enter(user, program)

    def take(self, step: Step) -> None:
        match step:
            case ("add", (user, program, model, priority)):
                self._count += 1
                # Ages that do not follow the order of arrival, as those of jobs that come back.
                age_s = float(self._count * 7 % 11)
                ticket = Ticket(f"{self._count}", user, program, model, age_s, priority)
                self.lanes.add(ticket)
                self.waiting.append(ticket)
            case ("remove", index) if self.waiting:
                ticket = self.waiting.pop(index % len(self.waiting))
                self.lanes.remove(ticket)
            case ("charge", ((user, program), used_s)):
                self.shares.charge(user, program, float(used_s))
                self.lanes.reorder(user, program)

    def least(
        self, priority: int, models: str, runnable: Runnable, lead: Lead | None
    ) -> Rank | None:
        ranks = [
            self.lanes.rank(ticket, lead)
            for ticket in self.waiting
            if ticket.priority == priority and ticket.model in models and runnable(ticket)
        ]
        return min(ranks, default=None)


@given(
    st.lists(steps, max_size=40),
    st.sampled_from(["M", "N", "MN"]),
    st.integers(0, 1),
    st.integers(1, 4),
    st.one_of(st.none(), st.tuples(st.sampled_from(PARTIES), st.floats(0, 5))),
)
def test_whoever_is_first_is_owed_most_of_all_that_can_run(
    steps: list[Step],
    models: str,
    priority: int,
    modulus: int,
    leading: tuple[tuple[str, str], float] | None,
) -> None:
    line = Line()
    for step in steps:
        line.take(step)
    lead = None
    if leading is not None:
        (user, program), used_s = leading
        lead = Lead(Ticket("lead", user, program, "M", 0.5), used_s)

    def runnable(ticket: Ticket) -> bool:
        return int(ticket.job) % modulus == 0

    for lanes in (line.lanes, line.lanes.copy(line.shares)):
        chosen = lanes.first(priority, models, runnable, lead)
        rank = None if chosen is None else lanes.rank(chosen, lead)
        assert rank == line.least(priority, models, runnable, lead)


@given(st.lists(steps, max_size=30))
def test_nothing_is_left_of_lanes_that_are_empty(steps: list[Step]) -> None:
    line = Line()
    for step in steps:
        line.take(step)
    for ticket in line.waiting:
        line.lanes.remove(ticket)
    assert not line.lanes
    assert line.lanes.priorities() == []
    assert line.lanes._of_party == {}
