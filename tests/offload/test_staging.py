"""Weights on disk reach a device with DMA through a small buffer: the same numbers, no race."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offload.rig import DEVICE_BYTES, disk_source, simulated_device
from offload.tiny_models import TINY_MODELS

from offload_protocol.errors import StorageFailed
from offloadd.offload.component import Component, attach_component
from offloadd.offload.grouping.groups import GroupOptions, group_module
from offloadd.offload.streaming.executor import Executor
from offloadd.offload.streaming.staging import READ_ALIGNMENT_BYTES, Staging
from offloadd.offload.streaming.tier import DeviceTier
from offloadd.store.source import WeightSource

FAMILY = TINY_MODELS["flux"]


def _attach(
    module: torch.nn.Module,
    source: WeightSource,
    staging: Staging,
    executor: Executor,
    tier: DeviceTier,
) -> Component:
    grouping = group_module(module, GroupOptions(small_limit_bytes=0))
    device = staging.accelerator
    component = attach_component(
        "m", module, grouping, source, device, tier, executor, staging=staging
    )
    executor.configure("m", frozenset({1, 4}), 3 * max(grouping.sizes_bytes()))
    return component


@pytest.mark.parametrize("pages", [8, 24, 1000])
def test_staged_weights_change_no_bit_however_small_the_buffer(pages: int, tmp_path: Path) -> None:
    module = FAMILY.build()
    expected = FAMILY.run(module, FAMILY.example_inputs())
    device = simulated_device(seed=5)
    tier = DeviceTier(device, DEVICE_BYTES)
    executor = Executor(device, tier)
    staging = Staging(device, pages * READ_ALIGNMENT_BYTES)
    with disk_source(module, tmp_path / "m.safetensors") as source, device.watched():
        component = _attach(module, source, staging, executor, tier)
        for _ in range(4):
            assert torch.equal(FAMILY.run(module, FAMILY.example_inputs()), expected)
        assert staging.size_bytes == pages * READ_ALIGNMENT_BYTES
        component.detach()
        staging.close()
    assert staging.size_bytes == 0
    assert device.hazards == []


def test_a_failed_read_fails_the_call_and_leaves_the_buffer_usable(tmp_path: Path) -> None:
    module, other = FAMILY.build(), FAMILY.build(seed=1)
    device = simulated_device()
    tier = DeviceTier(device, DEVICE_BYTES)
    executor = Executor(device, tier)
    staging = Staging(device, 64 * READ_ALIGNMENT_BYTES)
    expected = FAMILY.run(other, FAMILY.example_inputs())
    broken = tmp_path / "broken.safetensors"
    with disk_source(module, broken) as source:
        component = _attach(module, source, staging, executor, tier)
        FAMILY.run(module, FAMILY.example_inputs())
        with broken.open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(StorageFailed, match="broken"):
            FAMILY.run(module, FAMILY.example_inputs())
        component.detach()
    with disk_source(other, tmp_path / "sound.safetensors") as source:
        component = _attach(other, source, staging, executor, tier)
        for _ in range(3):
            assert torch.equal(FAMILY.run(other, FAMILY.example_inputs()), expected)
        component.detach()
