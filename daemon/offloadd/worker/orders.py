"""Jobs that the control plane ordered and no thread has taken yet.

One thread puts, several take. Of those that wait, the one that came last gets the next order: while
one job follows another the same thread runs them all, with its caches warm, and no order passes
through a second thread on its way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offloadd.channel.framing import Frame
from offloadd.channel.messages import LoadModel, Register, RunJob, UnloadModel
from offloadd.worker.turns import JobTurn

ModelWork = Register | LoadModel | UnloadModel


@dataclass(frozen=True, slots=True)
class Order:
    """A job with the frames that came with it, and its turn."""

    work: RunJob
    frames: Sequence[Frame]
    turn: JobTurn


class _Taker:
    """A thread that waits for an order."""

    __slots__ = ("gate", "order")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.order: Order | None = None


class Orders:
    """A line of orders, or of threads that wait for one; never both."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._line: deque[Order] = deque()
        self._takers: list[_Taker] = []

    @property
    def somebody_waits(self) -> bool:
        """Whether a thread waits for the next order."""
        return bool(self._takers)

    def put(self, order: Order) -> None:
        """Hand an order to a thread that waits, or add it at the end of the line."""
        with self._mutex:
            if self._takers:
                taker = self._takers.pop()
                taker.order = order
                taker.gate.release()
            else:
                self._line.append(order)

    def take(self) -> Order:
        """Wait for the next order."""
        order = self.take_within(None)
        assert order is not None, "an unlimited wait ends with an order"
        return order

    def take_within(self, timeout_s: float | None) -> Order | None:
        """The next order, or None where none came in time."""
        with self._mutex:
            if self._line:
                return self._line.popleft()
            own = _Taker()
            self._takers.append(own)
        if not own.gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            with self._mutex:
                if own in self._takers:
                    self._takers.remove(own)
        return own.order
