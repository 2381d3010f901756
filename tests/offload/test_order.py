"""Predictions follow the last step, wrap round it, and catch on again after any detour."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from offloadd.offload.streaming.order import StepOrder

steps = st.lists(st.integers(0, 6), min_size=1, max_size=20)


def after(*runs: Iterable[int]) -> StepOrder[int]:
    order: StepOrder[int] = StepOrder()
    for run in runs:
        order.begin()
        for key in run:
            order.acquire(key)
        order.finish()
    return order


def without_repeats(keys: Iterable[int]) -> tuple[int, ...]:
    kept: list[int] = []
    for key in keys:
        if not kept or kept[-1] != key:
            kept.append(key)
    return tuple(kept)


def test_nothing_is_predicted_before_the_first_step_is_over() -> None:
    order: StepOrder[int] = StepOrder()
    assert not order.acquire(3)
    assert order.upcoming(4) == ()


def test_the_prediction_wraps_from_the_last_group_to_the_first() -> None:
    order = after([0, 1, 2])
    order.acquire(0)
    order.acquire(1)
    assert order.upcoming(5) == (2, 0, 1, 2, 0)
    assert order.remaining == 1


def test_a_module_may_be_called_several_times_in_a_step() -> None:
    order = after([0, 1, 0, 2, 0, 1])
    for key, following in [(0, 1), (1, 0), (0, 2), (2, 0), (0, 1)]:
        assert order.acquire(key)
        assert order.upcoming(1) == (following,)


def test_a_group_acquired_again_at_once_is_one_position() -> None:
    order = after([0, 0, 1, 1, 1, 0])
    assert order.known == (0, 1, 0)


def test_a_skipped_group_leaves_the_prediction_behind_the_next_known_one() -> None:
    order = after([0, 1, 2, 3, 4])
    order.acquire(0)
    assert not order.acquire(3)
    assert order.upcoming(2) == (4, 0)


def test_an_unknown_group_leaves_the_prediction_where_it_was() -> None:
    order = after([0, 1, 2])
    order.acquire(0)
    assert not order.acquire(9)
    assert order.upcoming(2) == (1, 2)


def test_a_step_back_goes_on_from_the_earlier_place() -> None:
    order = after([0, 1, 2, 3])
    for key in (0, 1, 2):
        order.acquire(key)
    assert not order.acquire(1)
    assert order.upcoming(2) == (2, 3)


def test_a_detour_becomes_the_known_order() -> None:
    order = after([0, 1, 2], [0, 2, 1])
    assert order.known == (0, 2, 1)


def test_a_step_that_did_not_finish_is_forgotten() -> None:
    order = after([0, 1, 2])
    order.begin()
    order.acquire(2)
    order.begin()
    assert order.known == (0, 1, 2)
    assert order.recorded_length == 0
    assert order.upcoming(1) == (0,)


def test_finishing_says_whether_the_step_was_as_before() -> None:
    order = after([0, 1])
    order.acquire(0)
    order.acquire(1)
    assert order.finish()
    order.acquire(1)
    assert not order.finish()


def test_a_step_without_groups_keeps_the_known_order() -> None:
    order = after([0, 1])
    order.finish()
    assert order.known == (0, 1)


def test_what_is_remembered_is_bounded() -> None:
    order: StepOrder[int] = StepOrder(max_length=3)
    for key in range(10):
        order.acquire(key)
    order.finish()
    assert order.known == (0, 1, 2)


@given(steps)
def test_the_same_step_again_is_predicted_at_every_position(keys: list[int]) -> None:
    order = after(keys)
    expected = without_repeats(keys)
    assert order.known == expected
    for position, key in enumerate(expected):
        assert order.upcoming(1) == (key,)
        assert order.acquire(key)
        assert order.remaining == len(expected) - position - 1


@given(st.lists(steps, min_size=1, max_size=4), steps)
def test_any_order_is_accepted_and_known_groups_are_found_again(
    history: list[list[int]], keys: list[int]
) -> None:
    order = after(*history)
    for key in keys:
        order.acquire(key)
        assert len(order.upcoming(30)) == 30
        known = order.known
        if key in known:
            following = {
                known[(place + 1) % len(known)] for place, other in enumerate(known) if other == key
            }
            assert order.upcoming(1)[0] in following
    order.finish()
    assert order.known == without_repeats(keys)


@given(steps, st.integers(0, 19), st.integers(0, 6))
def test_one_wrong_group_does_not_put_the_rest_of_a_step_without_repeats_out(
    keys: list[int], where: int, wrong: int
) -> None:
    expected = tuple(dict.fromkeys(keys))
    order = after(expected)
    where %= len(expected)
    wrong += 100
    hits = [order.acquire(key) for key in (*expected[:where], wrong, *expected[where:])]
    assert hits.count(False) == 1
