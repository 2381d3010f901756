"""What comes next, across steps and components."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offloadd.offload.streaming.prediction import Prediction

orders = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def _step(prediction: Prediction, component: str, order: list[int]) -> None:
    prediction.begin(component)
    for group in order:
        prediction.acquire(component, group)
    prediction.finish(component)


def _next(prediction: Prediction, count: int) -> list[tuple[str, int]]:
    return list(prediction.upcoming(count))


def _two() -> Prediction:
    prediction = Prediction()
    prediction.add("a")
    prediction.add("b")
    return prediction


def test_nothing_is_expected_before_anything_was_seen() -> None:
    prediction = _two()
    assert _next(prediction, 5) == []
    prediction.begin("a")
    prediction.acquire("a", 0)
    assert _next(prediction, 5) == []


def test_a_step_is_expected_to_repeat_and_wraps_over_its_border() -> None:
    prediction = _two()
    _step(prediction, "a", [0, 1, 2])
    prediction.begin("a")
    prediction.acquire("a", 0)
    assert _next(prediction, 4) == [("a", 1), ("a", 2), ("a", 0), ("a", 1)]


def test_after_as_many_steps_as_last_time_the_same_component_follows() -> None:
    prediction = _two()
    for _ in range(2):
        _step(prediction, "a", [0, 1])
        for _ in range(3):
            _step(prediction, "b", [5, 4])
    _step(prediction, "a", [0, 1])
    assert _next(prediction, 2) == [("b", 5), ("b", 4)]
    for _ in range(2):
        _step(prediction, "b", [5, 4])
        assert _next(prediction, 2) == [("b", 5), ("b", 4)]
    _step(prediction, "b", [5, 4])
    assert _next(prediction, 4) == [("a", 0), ("a", 1), ("b", 5), ("b", 4)]


def test_calls_outside_of_a_roots_forward_make_steps_of_their_own() -> None:
    prediction = _two()
    for _ in range(2):
        starts = [prediction.acquire("b", group) for group in (0, 1, 2)]
        assert starts == [True, False, False]
    assert prediction.known("b") == (0, 1, 2)
    assert _next(prediction, 2) == [("b", 0), ("b", 1)]
    _step(prediction, "a", [7])
    assert prediction.known("b") == (0, 1, 2)


def test_a_step_that_raised_is_not_remembered() -> None:
    prediction = _two()
    _step(prediction, "a", [0, 1, 2])
    prediction.begin("a")
    prediction.acquire("a", 0)
    _step(prediction, "a", [0, 1, 2])
    assert prediction.known("a") == (0, 1, 2)


def test_a_removed_component_is_expected_no_more() -> None:
    prediction = _two()
    _step(prediction, "a", [0])
    _step(prediction, "b", [1])
    _step(prediction, "a", [0])
    prediction.remove("b")
    assert _next(prediction, 2) == [("a", 0), ("a", 0)]
    prediction.remove("a")
    assert _next(prediction, 2) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), orders), max_size=12), st.integers(0, 30))
def test_any_sequence_of_steps_leaves_a_prediction_of_known_groups(
    steps: list[tuple[str, list[int]]], count: int
) -> None:
    prediction = _two()
    for component, order in steps:
        _step(prediction, component, order)
    upcoming = _next(prediction, count)
    assert len(upcoming) == (count if steps else 0)
    assert all(group in prediction.known(component) for component, group in upcoming)


def test_what_follows_a_step_that_does_not_come_is_expected_instead() -> None:
    prediction = _two()
    prediction.add("c")
    prediction.skip("a")
    for _ in range(2):
        for _ in range(2):
            _step(prediction, "a", [0])
        _step(prediction, "b", [1])
        _step(prediction, "c", [2])
    assert _next(prediction, 1) == [("a", 0)]
    prediction.skip("b")
    assert _next(prediction, 1) == [("a", 0)]
    # Twice, as it came.
    for _ in range(2):
        prediction.skip("a")
        assert _next(prediction, 2) == [("b", 1), ("c", 2)]
    prediction.skip("b")
    assert _next(prediction, 1) == [("c", 2)]
    _step(prediction, "c", [2])
    # The first comes and the second does not.
    _step(prediction, "a", [0])
    prediction.skip("a")
    assert _next(prediction, 1) == [("b", 1)]
