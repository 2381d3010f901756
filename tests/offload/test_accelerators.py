"""The CPU as a device, and what a torch device needs; a GPU's own tests run where one is."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch

from offload_protocol.errors import ModelLoadFailed, OutOfMemory
from offloadd.offload.accelerator.cpu import CpuAccelerator
from offloadd.offload.accelerator.torch_device import TorchAccelerator
from offloadd.offload.host_memory import anonymous_bytes, bytes_of, view_of


def test_cpu_memory_starts_on_a_page_so_that_direct_reads_may_land_in_it() -> None:
    for size_bytes in (1, 4096, 100_001):
        block = CpuAccelerator().allocate(size_bytes)
        assert block.nbytes == size_bytes
        assert block.data_ptr() % mmap.PAGESIZE == 0


def test_memory_that_the_host_does_not_have_is_an_answer() -> None:
    with pytest.raises(OutOfMemory) as refused:
        CpuAccelerator().allocate(1 << 60)
    assert refused.value.details["needed_bytes"] == 1 << 60


def test_on_the_cpu_every_event_is_over_at_once() -> None:
    accelerator = CpuAccelerator()
    first, second = accelerator.event(timed=True), accelerator.event(timed=True)
    first.record(accelerator.compute_queue())
    second.record(accelerator.compute_queue())
    assert second.query()
    assert first.elapsed_s(second) >= 0
    memory = accelerator.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_a_read_only_view_is_seen_without_a_copy_and_kept_alive() -> None:
    data = bytearray(range(16))
    tensor = bytes_of(memoryview(data)[4:].toreadonly())
    data[5] = 99
    assert tensor.tolist() == [4, 99, *range(6, 16)]
    with pytest.raises(BufferError):
        data.append(1)
    assert bytes_of(memoryview(b"")).nbytes == 0


def test_a_writable_view_reaches_the_tensor() -> None:
    tensor = anonymous_bytes(8)
    view_of(tensor)[2:4] = b"\x07\x08"
    assert tensor.tolist() == [0, 0, 7, 8, 0, 0, 0, 0]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ModelLoadFailed, match="no accelerator"):
        TorchAccelerator(torch.device("cuda", 0))


@pytest.fixture
def gpu() -> Iterator[TorchAccelerator]:
    if not torch.accelerator.is_available():
        pytest.skip("torch sees no accelerator here")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    yield TorchAccelerator(device)
    torch.accelerator.synchronize()


@pytest.mark.gpu
def test_a_copy_arrives_before_compute_that_waits_for_it(gpu: TorchAccelerator) -> None:
    source = anonymous_bytes(1 << 24)
    source.random_(0, 256)
    unpin = gpu.pin(view_of(source))
    block = gpu.allocate(source.nbytes)
    fresh, ready = gpu.event(), gpu.event()
    fresh.record(gpu.compute_queue())
    gpu.transfer_queue.wait(fresh)
    gpu.copy(block, source)
    ready.record(gpu.transfer_queue)
    gpu.compute_queue().wait(ready)
    assert torch.equal(block.cpu(), source)
    if unpin is not None:
        unpin()


@pytest.mark.gpu
def test_timed_events_measure_device_time(gpu: TorchAccelerator) -> None:
    began, ended = gpu.event(timed=True), gpu.event(timed=True)
    began.record(gpu.compute_queue())
    torch.randn(512, 512, device=gpu.device) @ torch.randn(512, 512, device=gpu.device)
    ended.record(gpu.compute_queue())
    ended.synchronize()
    assert 0 < began.elapsed_s(ended) < 10
