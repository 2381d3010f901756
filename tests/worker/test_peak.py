"""The peak of a job is its own: what was freed before it began does not count."""

from __future__ import annotations

import torch

from offloadd.worker.peak import PeakMeter

CPU = torch.device("cpu")
MIB = 1 << 20


def test_memory_that_was_freed_again_shows_in_the_peak() -> None:
    before_bytes = PeakMeter(CPU).peak_bytes()
    meter = PeakMeter(CPU)
    large = torch.ones(64 * MIB, dtype=torch.uint8)
    del large
    with_large_bytes = meter.peak_bytes()
    assert before_bytes > 0
    assert with_large_bytes >= before_bytes + 60 * MIB
    assert PeakMeter(CPU).peak_bytes() <= with_large_bytes - 60 * MIB
