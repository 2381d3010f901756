"""The ring's arithmetic, against arbitrary sequences of allocations and releases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.offload.streaming.ring import Place, Ring

sizes = st.integers(1, 40)
actions = st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 10_000)), max_size=80)


def _run(ring: Ring, script: list[tuple[bool, int, int]]) -> None:
    for is_allocation, size_bytes, choice in script:
        if is_allocation:
            ring.allocate(size_bytes)
        elif ring.live:
            ring.release(ring.live[choice % len(ring.live)])


@given(actions, st.sampled_from([1, 4, 16]))
def test_live_places_are_aligned_inside_and_apart(
    script: list[tuple[bool, int, int]], alignment_bytes: int
) -> None:
    ring = Ring(100, alignment_bytes)
    for step in script:
        _run(ring, [step])
        for place in ring.live:
            assert place.start_bytes % alignment_bytes == 0
            assert 0 <= place.start_bytes < place.stop_bytes <= 100
        assert all(not a.overlaps(b) for i, a in enumerate(ring.live) for b in ring.live[i + 1 :])


@given(actions, st.sampled_from([1, 4, 16]), sizes)
def test_a_gap_that_is_large_enough_is_always_found(
    script: list[tuple[bool, int, int]], alignment_bytes: int, size_bytes: int
) -> None:
    ring = Ring(100, alignment_bytes)
    _run(ring, script)
    free_somewhere = any(
        start + size_bytes <= 100
        and not any(Place(start, start + size_bytes).overlaps(place) for place in ring.live)
        for start in range(0, 100, alignment_bytes)
    )
    assert (ring.allocate(size_bytes) is not None) == free_somewhere


@given(st.lists(sizes, min_size=1, max_size=60), st.integers(1, 4))
def test_places_released_in_order_keep_coming(sizes_bytes: list[int], depth: int) -> None:
    ring = Ring(40 * depth, 1)
    waiting: list[Place] = []
    for size_bytes in sizes_bytes:
        place = ring.allocate(size_bytes)
        while place is None:
            ring.release(waiting.pop(0))
            place = ring.allocate(size_bytes)
        waiting.append(place)
    assert ring.live == tuple(sorted(waiting))


def test_uniform_groups_take_turns_on_the_same_places() -> None:
    ring = Ring(2 * 64, 64)
    starts = []
    previous = None
    for _ in range(6):
        place = ring.allocate(60)
        assert place is not None
        starts.append(place.start_bytes)
        if previous is not None:
            ring.release(previous)
        previous = place
    assert starts == [0, 64, 0, 64, 0, 64]


def test_a_tail_that_is_too_short_is_skipped() -> None:
    ring = Ring(10, 1)
    first, second = ring.allocate(4), ring.allocate(4)
    assert first is not None
    assert second == Place(4, 8)
    assert ring.allocate(3) is None
    ring.release(first)
    assert ring.allocate(3) == Place(0, 3)
    assert ring.allocate(2) == Place(8, 10), "the skipped tail serves a smaller group"


def test_a_long_held_place_does_not_stop_the_ring() -> None:
    ring = Ring(12, 1)
    held = ring.allocate(4)
    for _ in range(5):
        place = ring.allocate(4)
        assert place is not None
        assert held is not None
        assert not place.overlaps(held)
        ring.release(place)


def test_a_size_that_can_never_fit_is_an_error_not_a_wait() -> None:
    with pytest.raises(ValueError, match="never fit"):
        Ring(10, 1).allocate(11)


def test_releasing_twice_is_an_error() -> None:
    ring = Ring(10, 1)
    place = ring.allocate(5)
    assert place is not None
    ring.release(place)
    with pytest.raises(ValueError, match="not live"):
        ring.release(place)
