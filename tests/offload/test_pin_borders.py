"""A copy to the device never crosses from one page-locked piece into the next."""

from __future__ import annotations

import torch

from offloadd.offload.accelerator.cpu import CpuAccelerator
from offloadd.offload.streaming.tier import Region
from offloadd.offload.streaming.transfers import DmaLoader


class Counting(CpuAccelerator):
    """The CPU, with the sizes of its copies written down."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.sizes.append(source.nbytes)
        super().copy(destination, source)


def test_a_group_across_borders_is_copied_in_parts() -> None:
    device = Counting()
    extent = torch.arange(100, dtype=torch.uint8)
    region = Region(torch.zeros(50, dtype=torch.uint8), None, ())
    DmaLoader(device, extent, borders=(10, 30, 60, 90)).start(20, 70, region)
    assert torch.equal(region.tensor, extent[20:70])
    assert device.sizes == [10, 30, 10]


def test_a_group_between_borders_is_one_copy() -> None:
    device = Counting()
    extent = torch.arange(100, dtype=torch.uint8)
    region = Region(torch.zeros(20, dtype=torch.uint8), None, ())
    DmaLoader(device, extent, borders=(10, 30)).start(10, 30, region)
    assert device.sizes == [20]
