"""Who listens to the control plane: one thread at a time, and it may be one that runs jobs.

A thread that takes a job off the channel runs it, so that a small job passes through no second
thread on its way. Invariants:
- One thread at a time receives: the receiver, or a thread of the crew without a job.
- A thread that has a job which is not likely to be over in a moment lets go of the right before it
  begins. Where one that was likely to be brief is not, whether it waits or computes, the receiver
  takes the right after `PATIENCE_S`. So a cancel, a turn, memory that is granted and the end of the
  channel are noticed whatever a job does.
- Whenever the receiver gets the right, some thread is there to take the next job from it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE_S = 0.02


class Ear:
    """One thread's part in listening; `on_loss` is called when another is to take its place."""

    def __init__(self, listening: Listening, on_loss: Callable[[], None]) -> None:
        self.on_loss = on_loss
        self._listening = listening

    def listens(self) -> bool:
        """Whether it is for this thread to receive; if nobody does, it is from now on."""
        return self._listening.take(self)

    def begin(self, *, is_handed: bool) -> None:
        """This thread has a job, which it received, or which was handed to it."""
        self._listening.begin(self, is_handed)

    def let_go(self) -> None:
        """The job may take its time: let another thread listen."""
        self._listening.let_go(self)


class Listening:
    """The right to receive."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._holder: Ear | None = None
        self._is_handed = False
        """A job is on its way from the receiver to another thread, and the right with it."""
        self._busy_since_s: float | None = None
        """Since when whoever has the right has a job."""
        self._gate = threading.Lock()
        self._gate.acquire()
        self._is_watched = self._is_asleep = False
        """The receiver waits at the gate; and until it is opened, however long that takes."""

    def take(self, ear: Ear) -> bool:
        """Whether the right is this one's; it is if nobody has it."""
        with self._mutex:
            if self._holder is None and not self._is_handed:
                self._holder = ear
            if self._holder is not ear:
                return False
            self._busy_since_s = None
            return True

    def begin(self, ear: Ear, is_handed: bool) -> None:
        """A thread has a job; with `is_handed` the right comes with it, unless it was too slow."""
        with self._mutex:
            if is_handed and self._is_handed:
                self._holder, self._is_handed = ear, False
            has_it = self._holder is ear
            if has_it:
                self._busy_since_s = time.monotonic()
                if self._is_asleep:
                    self._open()
        if not has_it:
            ear.on_loss()

    def let_go(self, ear: Ear) -> None:
        """Have the receiver listen, if this one had the right."""
        with self._mutex:
            if self._holder is not ear:
                return
            self._holder = self._busy_since_s = None
        ear.on_loss()
        with self._mutex:
            if self._is_watched:
                self._open()

    def hand_over(self, ear: Ear) -> None:
        """The receiver is about to hand a job to another thread, and the right with it."""
        with self._mutex:
            if self._holder is ear:
                self._holder, self._is_handed = None, True
                self._busy_since_s = time.monotonic()

    def wait_for(self, ear: Ear) -> None:
        """Wait until the right is the receiver's, or take it from a job that is not brief."""
        while True:
            with self._mutex:
                since_s = self._busy_since_s
                is_free = self._holder is None and not self._is_handed
                is_overdue = since_s is not None and time.monotonic() - since_s >= PATIENCE_S
                lost, has_it = self._holder, is_free or is_overdue
                if has_it:
                    self._holder, self._is_handed, self._busy_since_s = ear, False, None
                else:
                    # Where nobody has a job, nothing ticks: whoever gets the next one says so.
                    self._is_watched, self._is_asleep = True, since_s is None
            if has_it:
                if lost is not None:
                    lost.on_loss()
                return
            if not self._gate.acquire(timeout=-1 if since_s is None else PATIENCE_S):
                with self._mutex:
                    was_opened, self._is_watched = not self._is_watched, False
                if was_opened:
                    self._gate.acquire()

    def _open(self) -> None:
        self._is_watched = self._is_asleep = False
        self._gate.release()
