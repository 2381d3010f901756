"""Groups whose bytes the host has where the device computes: nothing has to come.

Such a group still goes through the executor when its weights are converted for each use. Its
region is empty; its binding knows the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from offloadd.offload.streaming.tier import Region
from offloadd.offload.streaming.transfers import Load, Timing


@dataclass(frozen=True, slots=True)
class HeldLoad:
    """A load that was over before it began."""

    region: Region
    timing: Timing | None = None

    def wait(self) -> float:
        return 0.0

    def settle(self) -> None:
        return


class HeldLoader:
    """Moves nothing."""

    def start(
        self, start_bytes: int, stop_bytes: int, region: Region, *, timed: bool = False
    ) -> Load:
        return HeldLoad(region)
