"""The right to use the device: exactly one thread of a worker holds it.

Jobs hold it for a turn. Short work (attaching a model, unwinding a cancelled job) gets it from the
job that holds it at that job's next border, before jobs that wait for a turn, and gives it back.
Who waited longest goes first. Without anybody waiting, taking and giving back costs a microsecond.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Waiting:
    """A thread that waits, or will; `Baton.give_up` ends its wait for a turn."""

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.has_given_up = False
        self.was_handed = False


class Baton:
    """Handed from thread to thread, without anybody in between who could snatch it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_held = False
        self._short: deque[Waiting] = deque()
        self._turns: deque[Waiting] = deque()

    @property
    def short_work_waits(self) -> bool:
        """Whether `lend` would let anybody go first."""
        return bool(self._short)

    def take(self) -> None:
        """Wait for it, for short work."""
        own = self._take_or_wait(self._short)
        if own is not None:
            own.gate.acquire()

    def try_take(self) -> bool:
        """Take it if nobody holds it."""
        with self._mutex:
            was_free, self._is_held = not self._is_held, True
            return was_free

    def take_turn(self, waiting: Waiting) -> bool:
        """Wait for it, for a turn; False, and without it, if the wait was given up."""
        with self._mutex:
            if waiting.has_given_up:
                return False
            if not self._is_held:
                self._is_held = True
                return True
            self._turns.append(waiting)
            waiting.was_handed = False
        waiting.gate.acquire()
        # It may have been handed over and given up since; then the caller holds it.
        return waiting.was_handed

    def give_up(self, waiting: Waiting) -> None:
        """Let a thread not wait for its turn any more, now or later."""
        with self._mutex:
            waiting.has_given_up = True
            if waiting in self._turns:
                self._turns.remove(waiting)
                waiting.gate.release()

    def give_back(self) -> None:
        """Hand it on."""
        with self._mutex:
            line = self._short or self._turns
            if line:
                _hand_to(line.popleft())
            else:
                self._is_held = False

    def lend(self) -> None:
        """Let short work that waits go first; returns with the baton."""
        if not self._short:
            return
        with self._mutex:
            if not self._short:
                return
            own = Waiting()
            # Behind what waits now, and before whatever comes for a turn.
            self._short.append(own)
            _hand_to(self._short.popleft())
        own.gate.acquire()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it for short work."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Do without it for a while, in the middle of short work."""
        self.give_back()
        try:
            yield
        finally:
            self.take()

    def _take_or_wait(self, line: deque[Waiting]) -> Waiting | None:
        with self._mutex:
            if not self._is_held:
                self._is_held = True
                return None
            own = Waiting()
            line.append(own)
            return own


def _hand_to(waiting: Waiting) -> None:
    waiting.was_handed = True
    waiting.gate.release()
