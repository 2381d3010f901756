"""How long the disk worked on each read, which is not how long the read took.

Promises: reads that stand in a queue behind others do not count their waiting, so that the times of
all reads add up to the time in which the disk was busy, and bytes over time is its rate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class ReadTiming:
    """A read's bytes, and once it has ended, the seconds for which it was served."""

    size_bytes: int
    served_s: float | None = None

    def duration_s(self) -> float | None:
        return self.served_s


class ServiceClock:
    """Measures reads that are served in the order in which they were asked for.

    A read is served from when it was asked for, or from when the one before it ended if that was
    later. Any thread may say that one has ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._free_since_s = clock()

    def ended(self, timing: ReadTiming, asked_s: float) -> None:
        """A read has its last byte; `asked_s` is when it was asked for, by the same clock."""
        with self._lock:
            # Threads that end together may come here in another order than their clocks say.
            now_s = max(self._clock(), self._free_since_s)
            timing.served_s = now_s - max(asked_s, self._free_since_s)
            self._free_since_s = now_s
