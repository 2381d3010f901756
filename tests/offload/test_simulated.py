"""The simulated device keeps time, order and limits as it says, and notices every race."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_protocol.errors import OutOfMemory
from offloadd.offload.accelerator.happens_before import Party, Recorder
from offloadd.offload.accelerator.simulated import Link, SimulatedAccelerator


def _device(capacity_bytes: int = 4096, seed: int = 0, **link: float) -> SimulatedAccelerator:
    return SimulatedAccelerator(
        capacity_bytes, Link(**{"bandwidth_bytes_per_s": 1000.0, **link}), Random(seed)
    )


def _ordered_copy(device: SimulatedAccelerator, block: torch.Tensor, value: int) -> None:
    """Copy after what had the memory before, and let compute wait for it."""
    fresh, ready = device.event(), device.event()
    fresh.record(device.compute_queue())
    device.transfer_queue.wait(fresh)
    device.copy(block, torch.full_like(block, value))
    ready.record(device.transfer_queue)
    device.compute_queue().wait(ready)


def test_copies_and_compute_overlap_in_virtual_time() -> None:
    device = _device(latency_s=0.5)
    block = device.allocate(1000)
    device.copy(block, torch.zeros_like(block))
    device.compute(1.0)
    arrived = device.event()
    arrived.record(device.transfer_queue)
    assert device.compute_s == 1.0
    device.compute_queue().wait(arrived)
    device.compute(1.0)
    assert device.compute_s == 2.5
    assert device.host_s == 0.0
    arrived.synchronize()
    assert device.host_s == 1.5


def test_memory_beyond_the_capacity_is_refused_and_comes_back_when_dropped() -> None:
    device = _device(1000)
    block = device.allocate(600)
    with pytest.raises(OutOfMemory) as refused:
        device.allocate(600)
    assert refused.value.details == {"needed_bytes": 600, "free_bytes": 400}
    view = block[10:20]
    del block
    assert device.allocated_bytes == 600, "a view holds the memory"
    del view
    assert device.allocated_bytes == 0


@given(st.integers(0, 1000))
def test_what_compute_waited_for_is_there_and_what_it_did_not_may_be_nan(seed: int) -> None:
    device = _device(seed=seed)
    block = device.allocate(64)
    assert torch.isnan(block.view(torch.float32)).all()
    _ordered_copy(device, block, 7)
    assert (block == 7).all()
    device.retire(block)
    assert torch.isnan(block.view(torch.bfloat16)).all()


def test_a_copy_without_a_wait_is_sometimes_late() -> None:
    outcomes = set()
    for seed in range(20):
        device = _device(seed=seed)
        block = device.allocate(64)
        device.copy(block, torch.zeros_like(block))
        outcomes.add(bool((block == 0).all()))
    assert outcomes == {True, False}


def test_reading_before_the_copy_is_awaited_is_a_hazard() -> None:
    device = _device()
    block = device.allocate(64)
    fresh = device.event()
    fresh.record(device.compute_queue())
    device.transfer_queue.wait(fresh)
    device.copy(block, torch.ones_like(block))
    with device.watched():
        block.sum()
    assert [hazard.second.purpose for hazard in device.hazards] == ["aten.sum.default"]


def test_overwriting_what_compute_may_still_read_is_a_hazard() -> None:
    device = _device()
    block = device.allocate(64)
    _ordered_copy(device, block, 1)
    with device.watched():
        block.sum()
    assert device.hazards == []
    device.copy(block, torch.zeros_like(block))
    assert len(device.hazards) == 1


def test_fresh_memory_counts_as_last_used_by_compute() -> None:
    device = _device()
    block = device.allocate(64)
    device.copy(block, torch.zeros_like(block))
    assert [hazard.first.purpose for hazard in device.hazards] == ["use before allocation"]


def test_dropping_memory_under_a_copy_is_a_hazard() -> None:
    device = _device()
    block = device.allocate(64)
    fresh = device.event()
    fresh.record(device.compute_queue())
    device.transfer_queue.wait(fresh)
    device.copy(block, torch.zeros_like(block))
    del block
    assert [hazard.first.purpose for hazard in device.hazards] == ["copy from the host"]


def test_an_event_stands_for_its_last_record_and_for_nothing_before_it() -> None:
    device = _device()
    event = device.event()
    assert event.query()
    device.compute(2.0)
    event.record(device.compute_queue())
    assert not event.query()
    device.compute(5.0)
    event.synchronize()
    assert device.host_s == 2.0


accesses = st.lists(
    st.tuples(
        st.sampled_from(["compute", "transfer"]),
        st.integers(0, 6),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=12,
)


@given(accesses)
def test_one_queue_never_races_with_itself(script: list[tuple[Party, int, int, bool]]) -> None:
    recorder = Recorder()
    for _, start, length, writes in script:
        recorder.access("compute", start, start + length, writes=writes, purpose="test")
    assert recorder.hazards == []


@given(accesses)
def test_a_full_hand_over_after_every_access_orders_everything(
    script: list[tuple[Party, int, int, bool]],
) -> None:
    recorder = Recorder()
    parties: tuple[Party, ...] = ("compute", "transfer")
    for party, start, length, writes in script:
        recorder.access(party, start, start + length, writes=writes, purpose="test")
        for other in parties:
            recorder.wait(other, recorder.snapshot(party))
    assert recorder.hazards == []


@given(accesses)
def test_without_events_exactly_the_conflicts_between_queues_are_hazards(
    script: list[tuple[Party, int, int, bool]],
) -> None:
    recorder = Recorder()
    for party, start, length, writes in script:
        recorder.access(party, start, start + length, writes=writes, purpose="test")
    conflicts = any(
        a[0] != b[0] and (a[3] or b[3]) and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]
        for i, a in enumerate(script)
        for b in script[i + 1 :]
    )
    assert bool(recorder.hazards) == conflicts
