"""Counts what is read from disk for one component, and how long that took.

Reads overlap; the time counts while any of them is under way, so that bytes over seconds is the
rate that the component's weights really came at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from offloadd.channel.arena import Reading


class ReadMeter:
    """Used from any thread; `on_change` is called after each read."""

    def __init__(
        self, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self._size_bytes = 0

    def count(self, read: Future[int]) -> None:
        """Count a read that begins now."""
        with self._lock:
            if self._under_way == 0:
                self._busy_since_s = self._clock()
            self._under_way += 1
        read.add_done_callback(self._done)

    def reading(self) -> Reading:
        """The totals of all reads that are over."""
        with self._lock:
            return Reading(self._size_bytes, self._busy_s)

    def _done(self, read: Future[int]) -> None:
        failed = read.cancelled() or read.exception() is not None
        with self._lock:
            self._size_bytes += 0 if failed else read.result()
            self._under_way -= 1
            if self._under_way == 0:
                self._busy_s += self._clock() - self._busy_since_s
        self._on_change()
