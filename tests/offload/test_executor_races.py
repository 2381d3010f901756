"""Every event that the engine records or waits for is needed, and the simulated device says so.

Compute on the simulated device is eager, so values alone could not show a missing wait for the last
use of memory. The happens-before record must: each place in the engine that records an event or
waits for one is switched off in turn, and the record has to complain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload.rig import rig, simulated_device
from offload.tiny_models import TINY_MODELS
from torch import nn

import offloadd.offload
from offloadd.offload.accelerator.simulated import SimulatedEvent, SimulatedQueue
from offloadd.offload.grouping.groups import GroupOptions

Site = tuple[str, str, str]
"""An edge: module and function of the engine that calls, and what it calls."""

ENGINE = str(Path(offloadd.offload.__file__).parent)
FAMILY = TINY_MODELS["sd3"]

EDGES: tuple[Site, ...] = (
    ("tier.py", "_take", "record"),
    ("tier.py", "release", "record"),
    ("tier.py", "_order_release", "record"),
    ("tier.py", "_order_release", "wait"),
    ("transfers.py", "start", "record"),
    ("transfers.py", "start", "wait"),
    ("transfers.py", "wait", "wait"),
)
"""All edges that order memory; `test_every_edge_is_known` keeps the list whole."""

BORDERS = {("executor.py", "_mark_border", "record")}
"""Events that only the host waits for: they bound how far it runs ahead, and order no memory."""


def _exercise(directory: Path) -> tuple[list[str], list[torch.Tensor]]:
    """Stream, keep some groups, shrink the ring, send residents away; gives hazards and outputs."""
    device = simulated_device(seed=3)
    module = FAMILY.build()
    outputs = []
    with rig(device, directory) as streamed, device.watched():
        component = streamed.stream("a", module, GroupOptions(small_limit_bytes=4096))
        outputs += [FAMILY.run(module, FAMILY.example_inputs()) for _ in range(2)]
        sizes = component.grouping.sizes_bytes()
        for keep, ring_groups in (({0, 1, 2}, 3), ({4, 5}, 1), (set(), 2)):
            streamed.executor.configure("a", frozenset(keep), ring_groups * max(sizes))
            outputs += [FAMILY.run(module, FAMILY.example_inputs()) for _ in range(2)]
        streamed.executor.configure("a", frozenset(), max(sizes))
        component.detach()
    return [str(hazard) for hazard in device.hazards], outputs


def _intercept(monkeypatch: pytest.MonkeyPatch, decide: Callable[[Site], bool]) -> None:
    """Ask `decide` about each call of `record` and `wait` whether it may happen."""
    for kind, name in ((SimulatedEvent, "record"), (SimulatedQueue, "wait")):
        original = getattr(kind, name)

        def patched(self: Any, other: Any, *, original: Any = original, name: str = name) -> None:
            caller = sys._getframe(1).f_code
            site = (Path(caller.co_filename).name, caller.co_name, name)
            if not caller.co_filename.startswith(ENGINE) or decide(site):
                original(self, other)

        monkeypatch.setattr(kind, name, patched)


def test_with_all_events_nothing_races(tmp_path: Path) -> None:
    resident = FAMILY.build()
    expected = FAMILY.run(resident, FAMILY.example_inputs())
    hazards, outputs = _exercise(tmp_path)
    assert hazards == []
    assert all(torch.equal(output, expected) for output in outputs)


class _ParametersOnly(nn.Module):
    """Ends in a layer of parameters alone, and has one of its own beside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(32, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(48))
        self.norm = nn.LayerNorm(48)
        nn.init.normal_(self.norm.weight)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        normed: torch.Tensor = self.norm(x)
        return normed


@pytest.mark.parametrize("seed", range(4))
def test_case_48_layers_of_parameters_alone_are_waited_for_on_every_call(
    seed: int, tmp_path: Path
) -> None:
    module, x = _ParametersOnly(), torch.rand(3, 32)
    expected = module(x)
    device = simulated_device(seed)
    with rig(device, tmp_path) as streamed, device.watched():
        streamed.stream("toy", module, GroupOptions("leaf_level", small_limit_bytes=0))
        for _ in range(5):
            assert torch.equal(module(x), expected)
    assert [str(hazard) for hazard in device.hazards] == []


def test_every_edge_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Site] = set()

    def remember(site: Site) -> bool:
        seen.add(site)
        return True

    _intercept(monkeypatch, remember)
    _exercise(tmp_path)
    assert seen - BORDERS - {site for site in seen if site[0] == "trace.py"} == set(EDGES)


@pytest.mark.parametrize("edge", EDGES, ids="-".join)
def test_an_edge_that_is_left_out_is_caught(
    edge: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _intercept(monkeypatch, lambda site: site != edge)
    hazards, _ = _exercise(tmp_path)
    assert hazards, f"the engine lost {edge} and nothing was noticed"
