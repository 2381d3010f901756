"""The simulated ring never overwrites what is in use, and no schedule in its order is faster."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.offload.planning.schedule import (
    StepWork,
    Timeline,
    best_possible_step_s,
    exact_step_s,
    quick_step_s,
    simulate,
)
from offloadd.offload.streaming.ring import Place, Ring


@st.composite
def works(draw: st.DrawFn) -> StepWork:
    count = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=count, max_size=count))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])
    return StepWork(
        tuple(sizes),
        tuple(0.25 + size * draw(seconds) if size else 0.0 for size in sizes),
        tuple(draw(seconds) for _ in sizes),
    )


def uniform(count: int, copy_s: float, compute_s: float) -> StepWork:
    return StepWork((10,) * count, (copy_s,) * count, (compute_s,) * count)


def run(work: StepWork, ring_bytes: int, steps: int = 5) -> Timeline:
    return simulate(work, ring_bytes, steps=steps)


@given(works(), st.integers(0, 20))
def test_no_place_is_overwritten_before_it_has_been_computed_with(
    work: StepWork, more: int
) -> None:
    timeline = run(work, work.largest_bytes + more)
    copies = [interval for interval in timeline.intervals if interval.queue == "transfer"]
    computed = {
        (interval.step, interval.position): interval
        for interval in timeline.intervals
        if interval.queue == "compute"
    }
    for index, copy in enumerate(copies):
        assert copy.place is not None
        assert copy.place.stop_bytes <= work.largest_bytes + more
        assert computed[copy.step, copy.position].start_s >= copy.stop_s
        for earlier in copies[:index]:
            assert earlier.place is not None
            assert copy.start_s >= earlier.stop_s
            if earlier.place.overlaps(copy.place):
                assert copy.start_s >= computed[earlier.step, earlier.position].stop_s


@given(works(), st.integers(0, 20))
def test_compute_follows_the_order_without_overlap(work: StepWork, more: int) -> None:
    timeline = run(work, work.largest_bytes + more)
    ends = 0.0
    for interval in timeline.intervals:
        if interval.queue == "compute":
            assert interval.start_s >= ends
            ends = interval.stop_s
    assert ends == timeline.step_ends_s[-1]


@given(works(), st.integers(0, 20), st.data())
def test_waiting_on_purpose_never_helps(work: StepWork, more: int, data: st.DataObject) -> None:
    slower = st.sampled_from([0.0, 0.0, 1.0, 5.0])
    delayed = StepWork(
        work.streamed_bytes,
        tuple(seconds + data.draw(slower) if seconds else 0.0 for seconds in work.copy_s),
        tuple(seconds + data.draw(slower) for seconds in work.compute_s),
    )
    ring = work.largest_bytes + more
    pairs = zip(run(work, ring).step_ends_s, run(delayed, ring).step_ends_s, strict=True)
    assert all(first <= second for first, second in pairs)


@given(works(), st.integers(0, 20))
def test_no_ring_is_faster_than_the_best_possible(work: StepWork, more: int) -> None:
    ring = work.largest_bytes + more
    # As one long step, so that nothing is averaged away.
    long = StepWork(work.streamed_bytes * 4, work.copy_s * 4, work.compute_s * 4)
    best = best_possible_step_s(long, ring, steps=1)
    assert best <= run(long, ring, 1).step_s
    assert best <= quick_step_s(long, ring, steps=1)
    assert best >= long.bound_s - 1e-9


@given(works(), st.integers(0, 20), st.integers(0, 20))
def test_more_room_never_makes_the_best_possible_slower(
    work: StepWork, more: int, still_more: int
) -> None:
    ring = work.largest_bytes + more
    assert best_possible_step_s(work, ring + still_more, steps=1) <= best_possible_step_s(
        work, ring, steps=1
    )


@given(
    st.integers(2, 12),
    st.sampled_from([0.25, 0.5, 1.0, 1.5, 4.0]),
    st.integers(2, 6),
    st.integers(0, 9),
)
def test_equal_groups_in_two_slots_or_more_take_the_larger_of_compute_and_transfer(
    count: int, copy_s: float, slots: int, spare: int
) -> None:
    work = uniform(count, copy_s, 1.0)
    expected = pytest.approx(max(count * copy_s, count * 1.0))
    assert best_possible_step_s(work, slots * 10 + spare) == expected
    assert run(work, slots * 10, 8).step_s == expected
    assert quick_step_s(work, slots * 10 + spare) == expected


def test_equal_groups_in_one_slot_cannot_overlap() -> None:
    assert run(uniform(5, 2.0, 1.0), 10, 8).step_s == pytest.approx(15.0)
    assert best_possible_step_s(uniform(5, 2.0, 1.0), 10) == pytest.approx(15.0)


def test_there_is_no_bubble_at_the_border_of_steps() -> None:
    timeline = run(uniform(4, 1.0, 1.0), 20, 6)
    computes = [interval for interval in timeline.intervals if interval.queue == "compute"]
    gaps = [b.start_s - a.stop_s for a, b in pairwise(computes)]
    assert gaps == [0.0] * len(gaps)


def test_residents_give_streamed_groups_time_to_arrive() -> None:
    together = StepWork((10, 10, 10, 0, 0, 0), (2.0, 2.0, 2.0, 0, 0, 0), (1.0,) * 6)
    spread = StepWork((10, 0, 10, 0, 10, 0), (2.0, 0, 2.0, 0, 2.0, 0), (1.0,) * 6)
    assert run(spread, 20, 8).step_s == pytest.approx(6.0)
    assert run(together, 20, 8).step_s == pytest.approx(7.0)


def test_a_ring_smaller_than_a_group_is_no_schedule() -> None:
    work = uniform(2, 1.0, 1.0)
    assert best_possible_step_s(work, 9) == float("inf")
    assert quick_step_s(work, 9) == float("inf")
    assert exact_step_s(work, 9) == float("inf")
    with pytest.raises(ValueError, match="never fit"):
        run(work, 9)


@given(works(), st.integers(0, 20))
def test_places_are_those_of_the_engines_ring(work: StepWork, more: int) -> None:
    ring = Ring(work.largest_bytes + more, 1)
    live: list[Place] = []
    for interval in run(work, ring.capacity_bytes).intervals:
        if interval.place is not None:
            while (place := ring.allocate(interval.place.size_bytes)) is None:
                ring.release(live.pop(0))
            live.append(place)
            assert interval.place == place


@given(works(), st.integers(0, 20))
def test_the_step_time_is_that_of_the_timeline(work: StepWork, more: int) -> None:
    ring = work.largest_bytes + more
    assert exact_step_s(work, ring) == simulate(work, ring).step_s


def test_the_quick_simulation_is_the_exact_one_for_equal_groups() -> None:
    work = StepWork((10, 0, 10, 10, 0), (3.0, 0, 1.0, 2.0, 0), (1.0, 0.5, 2.0, 0.1, 3.0))
    for ring in (10, 19, 20, 30, 45):
        exact = simulate(work, ring).step_s
        assert quick_step_s(work, ring) == pytest.approx(exact)
