"""The times of reads that queue behind each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.offload.streaming.read_timing import ReadTiming, ServiceClock


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_read_that_waits_behind_another_counts_only_its_own_service() -> None:
    clock = Clock()
    service = ServiceClock(clock)
    first, second, late = ReadTiming(1), ReadTiming(1), ReadTiming(1)
    assert first.duration_s() is None
    clock.now_s = 2.0
    service.ended(first, asked_s=0.0)
    clock.now_s = 3.0
    service.ended(second, asked_s=0.5)
    clock.now_s = 10.0
    service.ended(late, asked_s=9.0)
    assert [one.duration_s() for one in (first, second, late)] == [2.0, 1.0, 1.0]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=20))
def test_the_times_add_up_to_the_time_in_which_the_disk_was_busy(
    reads: list[tuple[float, float]],
) -> None:
    clock = Clock()
    service = ServiceClock(clock)
    asked_s = free_s = busy_s = 0.0
    timings = []
    for pause_s, service_s in reads:
        asked_s += pause_s
        begun_s = max(asked_s, free_s)
        free_s, busy_s = begun_s + service_s, busy_s + service_s
        clock.now_s = free_s
        timings.append(timing := ReadTiming(1))
        service.ended(timing, asked_s)
    assert sum(one.duration_s() or 0.0 for one in timings) == pytest.approx(busy_s)
