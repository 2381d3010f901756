"""The scheduler's rules, as tables: what waits, and in which order it starts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_protocol.errors import Busy
from offloadd.control.scheduler import Bounds, Scheduler, Ticket

BOUNDS = Bounds(limit=100, per_client_limit=100, max_bytes=1000, model_turn_s=30.0)


def queued(text: str, bounds: Bounds = BOUNDS) -> Scheduler:
    """A queue from words such as `a:M` (client a, model M) or `a:M!3` (priority 3), a second apart.

    A job's name is its word with its place in the text.
    """
    scheduler = Scheduler(bounds)
    for place, word in enumerate(text.split()):
        rest, _, priority = word.partition("!")
        client, _, model = rest.partition(":")
        scheduler.add(
            Ticket(
                job=f"{rest}{place}",
                client=client,
                model=model,
                submitted_s=float(place),
                priority=int(priority or 0),
            ),
            retry_after_s=1.0,
        )
    return scheduler


def started(scheduler: Scheduler, now_s: float = 0.0, step_s: float = 0.0) -> str:
    """The order in which all jobs start when each takes `step_s`."""
    names = []
    while (ticket := scheduler.start_next(now_s, lambda _: True)) is not None:
        names.append(ticket.job)
        now_s += step_s
    return " ".join(names)


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        ("", ""),
        ("a:M a:M a:M", "a:M0 a:M1 a:M2"),
        ("a:M a:M a:M b:M", "a:M0 b:M3 a:M1 a:M2"),
        ("a:M a:M b:M b:M c:M", "a:M0 b:M2 c:M4 a:M1 b:M3"),
        ("a:M b:M!1 a:M!2", "a:M2 b:M1 a:M0"),
        ("a:A a:B a:C a:A a:B a:C", "a:A0 a:A3 a:B1 a:B4 a:C2 a:C5"),
        ("a:A b:B!1 a:A", "b:B1 a:A0 a:A2"),
    ],
)
def test_jobs_start_by_priority_model_client_and_age(waiting: str, order: str) -> None:
    assert started(queued(waiting)) == order


def test_case_40_alternating_models_are_grouped_instead_of_swapped() -> None:
    scheduler = queued(" ".join(["a:A b:B"] * 20))
    order = started(scheduler, step_s=0.1).split()
    models = [name[2] for name in order]
    assert sum(one != two for one, two in pairwise(models)) == 1


def test_case_40_a_model_is_not_preferred_longer_than_its_turn() -> None:
    scheduler = queued(" ".join(["a:A"] * 10 + ["b:B"]))
    order = started(scheduler, step_s=10.0).split()
    assert order.index("b:B10") == 3, "after 30 s of A"


def test_a_model_that_left_memory_is_no_longer_preferred() -> None:
    scheduler = queued("a:A b:B c:A")
    first = scheduler.start_next(0.0, lambda _: True)
    assert first is not None
    scheduler.model_left("A")
    assert started(scheduler) == "b:B1 c:A2"


def test_jobs_on_models_that_cannot_run_yet_wait_without_holding_up_others() -> None:
    scheduler = queued("a:A b:B")
    ticket = scheduler.start_next(0.0, lambda model: model == "B")
    assert ticket is not None
    assert ticket.job == "b:B1"
    assert scheduler.start_next(0.0, lambda model: model == "B") is None
    assert "a:A0" in scheduler


def test_a_full_queue_says_busy_with_depth_and_time() -> None:
    scheduler = queued("a:M b:M", Bounds(2, 2, 1000, 30.0))
    with pytest.raises(Busy, match="2 jobs wait already") as caught:
        scheduler.add(Ticket("x", "c", "M", 3.0), retry_after_s=7.0)
    assert caught.value.details == {"retry_after_s": 7.0, "depth": 2}
    assert "x" not in scheduler


def test_one_client_cannot_fill_the_queue() -> None:
    scheduler = queued("a:M a:M", Bounds(100, 2, 1000, 30.0))
    with pytest.raises(Busy, match="2 jobs of this client"):
        scheduler.add(Ticket("x", "a", "M", 3.0), retry_after_s=1.0)
    scheduler.add(Ticket("y", "b", "M", 3.0), retry_after_s=1.0)


def test_waiting_requests_are_bounded_in_bytes_but_one_always_fits() -> None:
    scheduler = Scheduler(BOUNDS)
    scheduler.add(Ticket("big", "a", "M", 0.0, size_bytes=5000), retry_after_s=1.0)
    with pytest.raises(Busy, match="5000 bytes"):
        scheduler.add(Ticket("x", "a", "M", 1.0, size_bytes=1), retry_after_s=1.0)
    assert scheduler.remove("big")
    scheduler.add(Ticket("x", "a", "M", 1.0, size_bytes=1), retry_after_s=1.0)


def test_a_job_is_removed_once() -> None:
    scheduler = queued("a:M")
    assert scheduler.remove("a:M0")
    assert not scheduler.remove("a:M0")
    assert len(scheduler) == 0


def test_expired_jobs_are_named_until_they_are_removed() -> None:
    scheduler = Scheduler(BOUNDS)
    scheduler.add(Ticket("soon", "a", "M", 0.0, deadline_s=5.0), retry_after_s=1.0)
    scheduler.add(Ticket("late", "a", "M", 0.0, deadline_s=9.0), retry_after_s=1.0)
    scheduler.add(Ticket("never", "a", "M", 0.0), retry_after_s=1.0)
    assert scheduler.expired(4.9) == []
    assert scheduler.expired(5.0) == ["soon"]


words = st.builds(
    lambda client, model, priority: f"{client}:{model}!{priority}",
    st.sampled_from("abc"),
    st.sampled_from("MNO"),
    st.integers(0, 2),
)


@given(st.lists(words, max_size=12), st.integers(0, 5), st.floats(0, 100))
def test_the_told_order_is_the_order_in_which_jobs_start(
    waiting: list[str], already_started: int, now_s: float
) -> None:
    scheduler = queued(" ".join(waiting))
    for _ in range(already_started):
        scheduler.start_next(0.0, lambda _: True)
    told = scheduler.order(now_s)
    assert " ".join(told) == started(scheduler, now_s)


@given(st.lists(words, max_size=30), st.floats(0.1, 40))
def test_every_job_starts_exactly_once(waiting: list[str], step_s: float) -> None:
    scheduler = queued(" ".join(waiting))
    order = started(scheduler, step_s=step_s).split()
    assert sorted(order) == sorted(
        f"{word.partition('!')[0]}{place}" for place, word in enumerate(waiting)
    )
    assert len(scheduler) == 0
