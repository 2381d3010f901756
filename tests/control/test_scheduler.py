"""The scheduler's rules, as tables: what waits, and in which order it starts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_protocol.errors import Busy
from offloadd.control.scheduling.scheduler import (
    LEAST_TURN_S,
    SWITCH_WORTH,
    Bounds,
    Scheduler,
    Ticket,
)

BOUNDS = Bounds(limit=100, per_user_limit=100, max_bytes=1000, model_turn_s=30.0)


def ticket(word: str, place: int, expected_s: float = 0.0) -> Ticket:
    """The job of a word such as `a:M` (user a, model M), `a/p:M` (program p) or `a:M!3` (priority).

    Its name is the word with its place in the text.
    """
    rest, _, priority = word.partition("!")
    who, _, model = rest.partition(":")
    user, _, program = who.partition("/")
    return Ticket(
        job=f"{rest}{place}",
        user=user,
        program=program,
        model=model,
        submitted_s=float(place),
        priority=int(priority or 0),
        expected_s=expected_s,
    )


def queued(
    text: str, bounds: Bounds = BOUNDS, *, switch_s: float = 0.0, expected_s: float = 0.0
) -> Scheduler:
    """A queue from words, a second apart."""
    scheduler = Scheduler(bounds, lambda model: switch_s)
    for place, word in enumerate(text.split()):
        scheduler.add(ticket(word, place, expected_s), retry_after_s=1.0)
    return scheduler


def started(
    scheduler: Scheduler, now_s: float = 0.0, step_s: float = 1.0, switch_s: float = 0.0
) -> str:
    """The order in which all jobs start when each takes `step_s`."""
    names, model = [], scheduler._turn.model
    while (one := scheduler.start_next(now_s, lambda _: True)) is not None:
        names.append(one.job)
        used_s = step_s + (switch_s if one.model != model else 0.0)
        model = one.model
        now_s += used_s
        scheduler.stopped(one.job, used_s)
    return " ".join(names)


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        ("", ""),
        ("a:M a:M a:M", "a:M0 a:M1 a:M2"),
        ("a:M a:M a:M b:M", "a:M0 b:M3 a:M1 a:M2"),
        ("a:M a:M b:M b:M c:M", "a:M0 b:M2 c:M4 a:M1 b:M3"),
        ("a:M b:M!1 a:M!2", "a:M2 b:M1 a:M0"),
        ("a/p:M a/p:M a/q:M b:M b:M", "a/p:M0 b:M3 a/q:M2 b:M4 a/p:M1"),
        ("a:A b:B!1 a:A", "b:B1 a:A0 a:A2"),
        ("a:A a:B a:A", "a:A0 a:B1 a:A2"),
    ],
)
def test_jobs_start_by_priority_then_fairly_then_by_age(waiting: str, order: str) -> None:
    assert started(queued(waiting)) == order


def test_programs_of_one_user_do_not_take_from_another_user() -> None:
    order = started(queued("a/p:M a/q:M a/r:M a/s:M b/p:M b/p:M b/p:M b/p:M")).split()
    assert [name[0] for name in order] == ["a", "b"] * 4


def test_who_used_the_device_longer_waits_longer() -> None:
    scheduler = queued("a:M a:M b:M b:M b:M b:M")
    order = []
    while (one := scheduler.start_next(0.0, lambda _: True)) is not None:
        order.append(one.user)
        scheduler.stopped(one.job, 9.0 if one.user == "a" else 3.0)
    assert order == ["a", "b", "b", "b", "a", "b"]


def test_idle_hours_are_not_saved_up_and_lonely_ones_not_paid_for() -> None:
    scheduler = queued("a:M a:M")
    for _ in range(2):
        one = scheduler.start_next(0.0, lambda _: True)
        assert one is not None
        scheduler.stopped(one.job, 3600.0)
    for place, word in enumerate(["a:M", "b:M", "a:M", "b:M", "b:M"], 10):
        scheduler.add(ticket(word, place), retry_after_s=1.0)
    order = [name[0] for name in started(scheduler).split()]
    assert order[:4] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


def test_case_40_alternating_models_are_grouped_when_switching_costs() -> None:
    scheduler = queued(" ".join(["a:A b:B"] * 20), switch_s=5.0)
    order = started(scheduler, step_s=0.5, switch_s=5.0).split()
    models = [name[2] for name in order]
    assert sum(one != two for one, two in pairwise(models)) <= 2


def test_case_40_switching_takes_at_most_a_fifth_of_the_time() -> None:
    scheduler = queued(" ".join(["a:A b:B"] * 45), switch_s=2.0)
    order = started(scheduler, step_s=1.0, switch_s=2.0).split()
    switches = sum(one[2] != two[2] for one, two in pairwise(order))
    assert switches * 2.0 <= (len(order) + switches * 2.0) / SWITCH_WORTH + 2.0


def test_case_40_a_model_is_not_preferred_longer_than_its_turn() -> None:
    scheduler = queued(" ".join(["a:A"] * 10 + ["b:B"]), switch_s=100.0)
    order = started(scheduler, step_s=10.0).split()
    assert order.index("b:B10") == 3, "after 30 s of A"


def test_a_switch_that_costs_nothing_waits_for_nothing() -> None:
    order = started(queued("a:A a:A a:A b:B b:B b:B"), step_s=1.0).split()
    assert [name[2] for name in order] == ["A", "B"] * 3


def test_a_model_that_left_memory_is_no_longer_preferred() -> None:
    scheduler = queued("a:A b:B c:A", switch_s=100.0)
    first = scheduler.start_next(0.0, lambda _: True)
    assert first is not None
    scheduler.stopped(first.job, 1.0)
    scheduler.model_left("A")
    assert started(scheduler) == "b:B1 c:A2"


def test_jobs_on_models_that_cannot_run_yet_wait_without_holding_up_others() -> None:
    scheduler = queued("a:A b:B")
    one = scheduler.start_next(0.0, lambda ticket: ticket.model == "B")
    assert one is not None
    assert one.job == "b:B1"
    assert scheduler.start_next(0.0, lambda ticket: ticket.model == "B") is None
    assert "a:A0" in scheduler


def test_a_full_queue_says_busy_with_depth_and_time() -> None:
    scheduler = queued("a:M b:M", Bounds(2, 2, 1000, 30.0))
    with pytest.raises(Busy, match="2 jobs wait already") as caught:
        scheduler.add(ticket("c:M", 3), retry_after_s=7.0)
    assert caught.value.details == {"retry_after_s": 7.0, "depth": 2}
    assert "c:M3" not in scheduler


def test_one_user_cannot_fill_the_queue_by_the_names_of_many_programs() -> None:
    scheduler = queued("a/p:M a/q:M", Bounds(100, 2, 1000, 30.0))
    with pytest.raises(Busy, match="2 jobs of this user"):
        scheduler.add(ticket("a/r:M", 3), retry_after_s=1.0)
    scheduler.add(ticket("b:M", 4), retry_after_s=1.0)


def test_what_was_accepted_comes_back_even_into_a_full_queue() -> None:
    scheduler = queued("a:M b:M", Bounds(2, 2, 1000, 30.0))
    one = scheduler.start_next(0.0, lambda _: True)
    assert one is not None
    scheduler.add(ticket("c:M", 3), retry_after_s=1.0)
    scheduler.put_back(one, 1.0)
    assert len(scheduler) == 3
    assert sorted(started(scheduler).split()) == ["a:M0", "b:M1", "c:M3"]


def test_a_job_that_comes_back_is_the_oldest_of_its_program() -> None:
    scheduler = queued("a:M a:M a:M")
    one = scheduler.start_next(0.0, lambda _: True)
    assert one is not None
    scheduler.stopped(one.job, 1.0)
    scheduler.restore(one)
    assert started(scheduler) == "a:M0 a:M1 a:M2"


def running(text: str, now_s: float = 0.0, switch_s: float = 0.0) -> Scheduler:
    """A queue from words, the first of which has the device since `now_s`."""
    scheduler = Scheduler(BOUNDS, lambda _: switch_s)
    first, *others = text.split()
    scheduler.add(ticket(first, 0), retry_after_s=1.0)
    assert scheduler.start_next(now_s, lambda _: True) is not None
    for place, word in enumerate(others, 1):
        scheduler.add(ticket(word, place), retry_after_s=1.0)
    return scheduler


@pytest.mark.parametrize(
    ("text", "used_s", "is_owed"),
    [
        ("a:M", 9.0, False),
        ("a:M a:M a:M", 9.0, False),
        ("a:M b:M", LEAST_TURN_S, True),
        ("a:M b:M", LEAST_TURN_S / 2, False),
        ("a/p:M a/q:M", 9.0, True),
        ("a:M!1 b:M", 9.0, False),
        ("a:M b:M!1", 0.0, True),
        ("a:M a:M!1", 0.0, True),
    ],
)
def test_case_41_a_job_gives_way_to_whoever_is_owed_the_device(
    text: str, used_s: float, is_owed: bool
) -> None:
    assert running(text).is_owed(used_s, used_s, lambda _: True) is is_owed


def test_nobody_gives_way_to_a_job_that_cannot_run() -> None:
    scheduler = running("a:M b:N")
    assert not scheduler.is_owed(9.0, 9.0, lambda ticket: ticket.model == "M")


def test_case_40_a_job_keeps_the_device_for_as_long_as_a_switch_is_worth() -> None:
    scheduler = running("a:A b:B", switch_s=2.0)
    almost_s = 2.0 * SWITCH_WORTH - 0.1
    assert not scheduler.is_owed(almost_s, almost_s, lambda _: True)
    assert scheduler.is_owed(almost_s + 0.2, almost_s + 0.2, lambda _: True)


def test_a_job_that_gave_way_has_its_next_turn_when_the_other_has_used_as_much() -> None:
    scheduler = running("a:M b:M b:M b:M b:M")
    long_one = ticket("a:M", 0)
    turns = []
    scheduler.put_back(long_one, 2.0)
    for _ in range(4):
        one = scheduler.start_next(0.0, lambda _: True)
        assert one is not None
        turns.append(one.user)
        if one.user == "a":
            scheduler.put_back(long_one, 2.0)
        else:
            scheduler.stopped(one.job, 1.0)
    assert turns == ["b", "b", "a", "b"]


def test_a_job_that_was_set_aside_counts_as_never_started() -> None:
    scheduler = running("a:A b:B", switch_s=0.0)
    scheduler.set_aside("a:A0")
    assert not scheduler.is_owed(9.0, 9.0, lambda _: True)
    scheduler.put_back(ticket("a:A", 0), 0.0)
    assert started(scheduler) == "a:A0 b:B1"


def test_waiting_requests_are_bounded_in_bytes_but_one_always_fits() -> None:
    scheduler = Scheduler(BOUNDS, lambda _: 0.0)
    scheduler.add(Ticket("big", "a", "", "M", 0.0, size_bytes=5000), retry_after_s=1.0)
    with pytest.raises(Busy, match="5000 bytes"):
        scheduler.add(Ticket("x", "a", "", "M", 1.0, size_bytes=1), retry_after_s=1.0)
    assert scheduler.remove("big")
    scheduler.add(Ticket("x", "a", "", "M", 1.0, size_bytes=1), retry_after_s=1.0)


def test_a_job_is_removed_once() -> None:
    scheduler = queued("a:M")
    assert scheduler.remove("a:M0")
    assert not scheduler.remove("a:M0")
    assert len(scheduler) == 0


def test_expired_jobs_are_named_until_they_are_removed() -> None:
    scheduler = Scheduler(BOUNDS, lambda _: 0.0)
    scheduler.add(Ticket("soon", "a", "", "M", 0.0, deadline_s=5.0), retry_after_s=1.0)
    scheduler.add(Ticket("late", "a", "", "M", 0.0, deadline_s=9.0), retry_after_s=1.0)
    scheduler.add(Ticket("never", "a", "", "M", 0.0), retry_after_s=1.0)
    assert scheduler.expired(4.9) == []
    assert scheduler.expired(5.0) == ["soon"]


def test_places_tell_when_a_job_will_start() -> None:
    scheduler = queued("a:A a:A b:B", switch_s=4.0, expected_s=10.0)
    places = scheduler.places(now_s=0.0, busy_s=3.0)
    assert [(one.job, one.position, one.starts_in_s) for one in places] == [
        ("a:A0", 1, 3.0),
        ("a:A1", 2, 17.0),
        ("b:B2", 3, 27.0),
    ]


words = st.builds(
    lambda user, program, model, priority: f"{user}/{program}:{model}!{priority}",
    st.sampled_from("abc"),
    st.sampled_from("pq"),
    st.sampled_from("MNO"),
    st.integers(0, 2),
)


@given(st.lists(words, max_size=12), st.integers(0, 5), st.floats(0, 100), st.sampled_from([0, 8]))
def test_the_told_order_is_the_order_in_which_jobs_start(
    waiting: list[str], already_started: int, now_s: float, switch_s: float
) -> None:
    scheduler = queued(" ".join(waiting), switch_s=switch_s, expected_s=2.0)
    for _ in range(already_started):
        one = scheduler.start_next(0.0, lambda _: True)
        if one is not None:
            scheduler.stopped(one.job, 2.0)
    told = [place.job for place in scheduler.places(now_s)]
    assert " ".join(told) == started(scheduler, now_s, step_s=2.0, switch_s=switch_s)


@given(st.lists(words, max_size=30), st.floats(0.1, 40), st.floats(0, 20))
def test_every_job_starts_exactly_once(waiting: list[str], step_s: float, switch_s: float) -> None:
    scheduler = queued(" ".join(waiting), switch_s=switch_s)
    order = started(scheduler, step_s=step_s, switch_s=switch_s).split()
    assert sorted(order) == sorted(
        f"{word.partition('!')[0]}{place}" for place, word in enumerate(waiting)
    )
    assert len(scheduler) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.5, 4)), min_size=12, max_size=60))
def test_no_user_who_waits_falls_behind_by_more_than_the_longest_turn(
    jobs: list[tuple[str, float]],
) -> None:
    scheduler = queued(" ".join(f"{user}:M" for user, _ in jobs))
    lengths = {f"{user}:M{place}": took_s for place, (user, took_s) in enumerate(jobs)}
    used_s = dict.fromkeys("abc", 0.0)
    while (one := scheduler.start_next(0.0, lambda _: True)) is not None:
        waiting = {name[0] for name in lengths if name in scheduler} | {one.user}
        assert used_s[one.user] <= min(used_s[user] for user in waiting) + 1e-9
        used_s[one.user] += lengths[one.job]
        scheduler.stopped(one.job, lengths[one.job])
