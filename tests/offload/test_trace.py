"""What a traced step says it took, and the link that explains its copies."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.offload.accelerator.simulated import Link, SimulatedAccelerator
from offloadd.offload.planning.trace import StepTrace, fit_link
from offloadd.offload.streaming.tier import Region
from offloadd.offload.streaming.transfers import DmaLoader, Load


def _load(device: SimulatedAccelerator, size_bytes: int) -> Load:
    memory = device.allocate(size_bytes)
    region = Region(memory, None, ())
    return DmaLoader(device, memory.clone()).start(0, size_bytes, region, timed=True)


def test_a_positions_compute_leaves_out_the_wait_for_its_group() -> None:
    device = SimulatedAccelerator(1 << 20, Link(1000.0), Random(0))
    trace = StepTrace(device)
    trace.begin()
    device.compute(0.25)
    for group, seconds in ((3, 1.0), (1, 2.0)):
        trace.need(group)
        load = _load(device, 4000)
        load.wait()
        trace.have(load)
        device.compute(seconds)
    trace.finish()
    (figures,) = trace.figures()
    assert figures.order == (3, 1)
    assert figures.compute_s == pytest.approx((1.25, 2.0))
    assert figures.step_s == pytest.approx(4.0 + 4.0 + 2.0)
    assert [size_bytes for size_bytes, _ in trace.copies()] == [4000, 4000]
    assert [seconds for _, seconds in trace.copies()] == pytest.approx([4.0, 4.0])


def test_a_step_that_did_not_end_does_not_count() -> None:
    device = SimulatedAccelerator(1 << 20, Link(), Random(0))
    trace = StepTrace(device)
    trace.begin()
    trace.need(0)
    trace.begin()
    trace.finish()
    assert trace.whole_steps == 0


@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=20, unique=True),
    st.floats(1.0, 1e6),
    st.floats(0.0, 1.0),
)
def test_a_link_is_found_again_from_its_copies(
    sizes: list[int], bandwidth: float, latency_s: float
) -> None:
    found, found_latency_s = fit_link([(size, latency_s + size / bandwidth) for size in sizes])
    predicted = [found_latency_s + size / found for size in sizes]
    expected = [latency_s + size / bandwidth for size in sizes]
    assert predicted == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_copies_that_no_link_explains_still_give_their_average_rate() -> None:
    assert fit_link([(100, 4.0), (300, 1.0)]) == (80.0, 0.0)
    with pytest.raises(ValueError, match="no copy"):
        fit_link([])
