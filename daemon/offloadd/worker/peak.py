"""The most memory that one job held on its device.

On a GPU: what torch's allocator had handed out at the worst moment, weights included. On a CPU the
device is the host, so it is the process's peak resident set, which counts libraries as well.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

_SELF = Path("/proc/self")
_RESET_PEAK = "5"
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


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
        match = _PEAK.search((_SELF / "status").read_text())
        return int(match[1]) * 1024 if match and self._was_reset else 0

    def _reset_host_peak(self) -> None:
        try:
            (_SELF / "clear_refs").write_text(_RESET_PEAK)
            self._was_reset = True
        except OSError:
            self._was_reset = False
