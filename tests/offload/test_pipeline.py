"""Components that take turns: what each fetches ahead, keeps and shares, on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch
from offload.rig import Rig, rig
from torch import nn

from offloadd.offload.accelerator.simulated import Link, SimulatedAccelerator
from offloadd.offload.grouping.groups import GroupOptions

KIB = 1024
LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-6)
DENOISER_STEPS = 4
BLOCKS = GroupOptions("block_level", small_limit_bytes=0)


class _Block(nn.Module):
    """Weights that are read, and a kernel that takes so many times as long as their copy."""

    def __init__(self, size_bytes: int, ratio: float, device: SimulatedAccelerator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size_bytes // 4), requires_grad=False)
        self.seconds = ratio * (LINK.latency_s + size_bytes / LINK.bandwidth_bytes_per_s)
        self._device = (device,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._device[0].compute(self.seconds)
        return x * 0.5 + self.weight[0] + self.weight[-1]


class _Blocks(nn.Module):
    def __init__(self, kib: tuple[int, ...], ratio: float, device: SimulatedAccelerator) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(one * KIB, ratio, device) for one in kib)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    @property
    def compute_s(self) -> float:
        return sum(block.seconds for block in self.blocks)  # type: ignore[misc]


@dataclass
class _Pipeline:
    """A text encoder of few large groups, a denoiser, and a decoder of many small ones."""

    device: SimulatedAccelerator
    ratio: float
    parts: dict[str, _Blocks] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        sizes = {
            "encoder": (512, 768, 512, 640),
            "denoiser": (256, 384, 320, 256, 256, 384),
            "decoder": (64, 96, 128, 96, 64, 32, 64, 128, 64, 96),
        }
        self.parts = {name: _Blocks(kib, self.ratio, self.device) for name, kib in sizes.items()}

    def request(self) -> torch.Tensor:
        x = self.parts["encoder"](torch.zeros(()))
        for _ in range(DENOISER_STEPS):
            x = self.parts["denoiser"](x)
        result: torch.Tensor = self.parts["decoder"](x)
        return result

    @property
    def compute_s(self) -> float:
        steps = {"denoiser": DENOISER_STEPS}
        return sum(part.compute_s * steps.get(name, 1) for name, part in self.parts.items())

    @property
    def size_bytes(self) -> int:
        return sum(p.numel() * 4 for part in self.parts.values() for p in part.parameters())

    def took_s(self) -> float:
        """How long the compute queue takes for one more request."""
        before_s = self.device.compute_s
        self.request()
        return self.device.compute_s - before_s


def _device() -> SimulatedAccelerator:
    return SimulatedAccelerator(1 << 24, LINK, Random(0))


@contextmanager
def _on_executor(pipeline: _Pipeline, directory: Path) -> Iterator[Rig]:
    """Nothing resident; each component asks for a ring of two of its own largest groups."""
    with rig(pipeline.device, directory) as streamed:
        streamed.tier.limit_bytes = 2048 * KIB
        components = [streamed.stream(name, part, BLOCKS) for name, part in pipeline.parts.items()]
        yield streamed
        for component in components:
            component.detach()


def test_no_bubble_at_any_border_of_a_pipeline_with_uneven_rings(tmp_path: Path) -> None:
    pipeline = _Pipeline(_device(), ratio=1.5)
    expected = pipeline.request()
    with _on_executor(pipeline, tmp_path) as streamed:
        for _ in range(3):
            assert torch.equal(pipeline.request(), expected)
        counters, device = streamed.executor.counters, pipeline.device
        misses, allocations, syncs = counters.misses, device.allocations, counters.host_syncs
        took_s = [pipeline.took_s() for _ in range(3)]
        assert took_s == pytest.approx([pipeline.compute_s] * 3, rel=1e-6)
        assert counters.misses == misses, "every group was there before it was needed"
        assert device.allocations == allocations, "one ring for all"
        assert counters.host_syncs == syncs == 0


def test_what_the_denoiser_keeps_stays_while_the_others_run(tmp_path: Path) -> None:
    pipeline = _Pipeline(_device(), ratio=0.5)
    expected = pipeline.request()
    with _on_executor(pipeline, tmp_path) as streamed:
        # The encoder would like to stay as well, for which there is no room beside these.
        streamed.executor.configure("encoder", frozenset(range(4)), 0)
        streamed.executor.configure("denoiser", frozenset({0, 2, 4}), 768 * KIB)
        streamed.tier.limit_bytes = (512 + 768 + 512 + 640) * KIB
        for _ in range(3):
            assert torch.equal(pipeline.request(), expected)
        moved_bytes = streamed.executor.counters.moved_bytes
        for part in ("encoder", "denoiser", "decoder"):
            pipeline.parts[part](torch.zeros(()))
            assert streamed.executor.resident_bytes("denoiser") == (256 + 320 + 256) * KIB
            assert streamed.executor.resident_bytes("encoder") == 0
        passing_bytes = (384 + 256 + 384) * KIB
        once_bytes = sum(
            4 * w.numel()
            for part in ("encoder", "decoder")
            for w in pipeline.parts[part].parameters()
        )
        assert streamed.executor.counters.moved_bytes - moved_bytes <= 2 * (
            passing_bytes + once_bytes
        )
