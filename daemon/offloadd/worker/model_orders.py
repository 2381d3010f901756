"""Orders about models that no thread has taken yet.

Promises: what is ordered of one model is done in that order, one after the other; another model
does not wait for it, since rewriting a model's files may take minutes.
"""

from __future__ import annotations

import threading
from collections import deque

from offloadd.channel.messages import Register
from offloadd.worker.orders import ModelWork


class ModelOrders:
    """One thread puts, several take; whoever takes an order says when it is done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[ModelWork] = deque()
        self._under_way: set[str] = set()
        self._waiting = 0

    @property
    def somebody_waits(self) -> bool:
        """Whether a thread waits for the next order."""
        with self._changed:
            return self._waiting > 0

    def put(self, work: ModelWork) -> None:
        """Add an order at the end of the line."""
        with self._changed:
            self._line.append(work)
            self._changed.notify_all()

    def take(self) -> ModelWork:
        """Wait for an order on a model on which nobody works; the oldest of these."""
        with self._changed:
            self._waiting += 1
            try:
                while (found := self._next()) is None:
                    self._changed.wait()
            finally:
                self._waiting -= 1
            self._line.remove(found)
            self._under_way.add(model_of(found))
            return found

    def done(self, work: ModelWork) -> None:
        """Let the next order on that model be taken."""
        with self._changed:
            self._under_way.discard(model_of(work))
            self._changed.notify_all()

    def _next(self) -> ModelWork | None:
        return next((one for one in self._line if model_of(one) not in self._under_way), None)


def model_of(work: ModelWork) -> str:
    """The name of the model that an order is about."""
    return work.spec.name if isinstance(work, Register) else work.name
