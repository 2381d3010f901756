"""What this process has asked the control plane for and has not been answered yet."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from offloadd.channel.arena import ExtentOpened, Recalled, Segment

Granted = tuple[Segment, int]
"""A segment and a descriptor of it."""


class Requests:
    """Numbers requests and brings answers to those who wait; used from any thread.

    `unwanted` gets the segments of an answer that nobody waits for any more.
    """

    def __init__(self, unwanted: Callable[[list[Granted]], None]) -> None:
        self._unwanted = unwanted
        self._lock = threading.Lock()
        self._last = 0
        self._answers: dict[int, Future[Any]] = {}
        self._granted: defaultdict[int, list[Granted]] = defaultdict(list)

    def new(self) -> tuple[int, Future[Any]]:
        """The number of a new request, and where its answer will be."""
        with self._lock:
            self._last += 1
            answer: Future[Any] = Future()
            self._answers[self._last] = answer
            return self._last, answer

    def give_up(self, request: int, answer: Future[Any]) -> None:
        """Nobody waits any more for the segments of a request."""
        with self._lock:
            is_pending = self._answers.pop(request, None) is not None
        if not is_pending:
            self._unwanted(answer.result())

    def opened(self, order: ExtentOpened, descriptors: Sequence[int]) -> None:
        """An extent's segments have come, or a part of them."""
        with self._lock:
            self._granted[order.request] += zip(order.segments, descriptors, strict=True)
            if order.more:
                return
            granted = self._granted.pop(order.request)
            answer = self._answers.pop(order.request, None)
        if answer is not None:
            answer.set_result(granted)
        else:
            self._unwanted(granted)

    def recalled(self, order: Recalled) -> None:
        """A `Recall` was answered."""
        with self._lock:
            answer = self._answers.pop(order.request)
        answer.set_result(order.index)
