"""A streamed forward equals the resident one bit for bit, for every family, device and budget."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from offload.rig import cpu_device, rig, simulated_device
from offload.tiny_models import TINY_MODELS

from offloadd.offload.grouping.groups import GroupOptions, OffloadType

LEVELS: tuple[OffloadType, ...] = ("block_level", "leaf_level")
BUDGETS = {"one_group": (0, 1.0), "two_groups": (0, 2.0), "half": (2, 2.5), "most": (1, 0.0)}
"""Which groups stay (one in so many), and how many of the largest group the ring holds."""


@functools.cache
def _answers(name: str) -> tuple[torch.Tensor, ...]:
    """What the resident model says to the inputs of three seeds."""
    family = TINY_MODELS[name]
    resident = family.build()
    return tuple(family.run(resident, family.example_inputs(seed)) for seed in range(3))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_streaming_from_disk_changes_no_bit(
    name: str, level: OffloadType, budget: str, tmp_path: Path
) -> None:
    family = TINY_MODELS[name]
    module = family.build()
    keep_every, ring_groups = BUDGETS[budget]
    with rig(cpu_device(), tmp_path) as streamed:
        options = GroupOptions(level, small_limit_bytes=0)
        streamed.stream(name, module, options, keep_every=keep_every, ring_groups=ring_groups)
        for seed, expected in enumerate(_answers(name)):
            assert torch.equal(family.run(module, family.example_inputs(seed)), expected)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_streaming_to_a_device_changes_no_bit_and_races_with_nothing(
    name: str, level: OffloadType, budget: str, tmp_path: Path
) -> None:
    family = TINY_MODELS[name]
    module = family.build()
    keep_every, ring_groups = BUDGETS[budget]
    device = simulated_device(seed=7)
    with rig(device, tmp_path) as streamed:
        options = GroupOptions(level, small_limit_bytes=0)
        streamed.stream(name, module, options, keep_every=keep_every, ring_groups=ring_groups)
        with device.watched():
            answers = [family.run(module, family.example_inputs(seed)) for seed in range(3)]
    for answer, expected in zip(answers, _answers(name), strict=True):
        assert torch.equal(answer, expected)
    assert device.hazards == []
    assert streamed.executor.counters.host_syncs == 0
