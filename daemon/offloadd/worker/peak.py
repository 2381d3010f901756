"""The most memory that one job held on its device.

On a GPU: what torch's allocator had handed out at the worst moment, weights included. On a CPU the
device is the host, so it is the process's peak resident set, which counts libraries as well.
"""

from __future__ import annotations

import os
import resource
from functools import cache
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_SLACK_BYTES = 1 << 20
"""A peak that is no higher above what is resident counts as a fresh one: to have the kernel forget
a peak walks all page tables and empties the processor's cache of them, which a small job feels."""


class PeakMeter:
    """Measures from its creation, or its latest restart, on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._reset_host_peak()

    def peak_bytes(self) -> int:
        """The peak since then; 0 where the system does not tell."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return _host_peak_bytes() if self._was_reset else 0

    def held_bytes(self) -> int:
        """What is held on a GPU now; 0 on a CPU, where it cannot be told from the rest."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_allocated(self._device))

    def _reset_host_peak(self) -> None:
        self._was_reset = True
        if _host_peak_bytes() - _resident_bytes() <= _SLACK_BYTES:
            return
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            self._was_reset = False


def _host_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_bytes() -> int:
    return int(os.pread(_statm(), 64, 0).split()[1]) * _PAGE_BYTES


@cache
def _statm() -> int:
    # Kept open: to open it takes as long as the rest of a small job.
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
