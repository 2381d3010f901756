"""What the control plane ordered and the device thread has not yet done, and which jobs to stop.

One thread puts, one takes. A cancelled job is either taken out of the line before it began, or
marked so that it stops at its next border; never both, so that it ends exactly once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offloadd.channel.framing import Frame
from offloadd.channel.messages import LoadModel, Register, RunJob, UnloadModel

Work = Register | LoadModel | UnloadModel | RunJob


@dataclass(frozen=True, slots=True)
class Order:
    """A message that is worked on in turn, with the frames that came with it."""

    work: Work
    frames: Sequence[Frame]


class Orders:
    """The line of orders, shared by the receiving thread and the device thread."""

    def __init__(self) -> None:
        self._line: deque[Order] = deque()
        self._running: str | None = None
        self._cancelled = False
        self._changed = threading.Condition()

    def put(self, work: Work, frames: Sequence[Frame]) -> None:
        """Add an order at the end of the line."""
        with self._changed:
            self._line.append(Order(work, frames))
            self._changed.notify()

    def take(self) -> Order:
        """Wait for the next order; a job that is taken counts as running until `done`."""
        order = self.take_within(None)
        assert order is not None, "an unlimited wait ends with an order"
        return order

    def take_within(self, timeout_s: float | None) -> Order | None:
        """The next order, as `take` gives it, or None where none came in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._line, timeout_s):
                return None
            order = self._line.popleft()
            self._running = order.work.job if isinstance(order.work, RunJob) else None
            self._cancelled = False
            return order

    def done(self) -> None:
        """Say that the order taken last has been answered."""
        with self._changed:
            self._running = None
            self._cancelled = False

    def cancel(self, job: str) -> bool:
        """Stop a job; True if it had not begun and is now out of the line.

        A job that is not known here has ended already, and nothing happens.
        """
        with self._changed:
            if job == self._running:
                self._cancelled = True
                return False
            waiting = [one for one in self._line if _is_job(one, job)]
            for order in waiting:
                self._line.remove(order)
            return bool(waiting)

    @property
    def is_cancelled(self) -> bool:
        """Whether the running job is to stop."""
        return self._cancelled


def _is_job(order: Order, job: str) -> bool:
    return isinstance(order.work, RunJob) and order.work.job == job
