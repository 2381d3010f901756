"""What the executor has done since it was made; benches and statistics take differences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals; `host_syncs` counts the host's waits for the device inside forwards.

    `waited_s` is how long the host waited for bytes, `border_waits` how often for an earlier
    forward to end, `misses` how many groups were not there, or on the way, when needed.
    """

    forwards: int = 0
    host_syncs: int = 0
    border_waits: int = 0
    misses: int = 0
    moved_bytes: int = 0
    waited_s: float = 0.0
