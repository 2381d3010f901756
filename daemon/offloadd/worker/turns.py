"""Jobs on a worker and their turns: a job goes on, gives way or stops at its next border.

The control plane decides whose turn it is; here one job at a time has it, and a job that gave way
waits on its own stack until it is told to go on. A job that is cancelled stops wherever it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from offload_protocol.errors import Cancelled
from offloadd.channel.messages import JobParked, JobStays
from offloadd.worker.baton import Baton
from offloadd.worker.sweeps import BatonHold, Hold

_AGAIN = "to draw it after all, submit it under a new id"

Send = Callable[[JobParked | JobStays], None]


class Aside(Protocol):
    """What a job has on the device and in the process, while it is not its turn."""

    def leave(self) -> int | None:
        """Put it aside; gives the bytes of the job's own tensors, or None where there is no room.

        With None nothing has changed.
        """

    def come_back(self) -> None:
        """Put everything in place again, as it was."""


class Shareable(Protocol):
    """A model, as far as turns go."""

    @property
    def is_better_shared(self) -> bool:
        """Whether jobs on it take less time together than one after the other."""


class JobTurn:
    """One job's turns. The job's thread calls its methods, but for those of `Turns`."""

    def __init__(self, job: str, baton: Baton, send: Send) -> None:
        self.job = job
        self._baton = baton
        self._send = send
        self.is_better_shared = False
        """What the job has seen of its model when it last had the device."""
        self.activations_bytes = 0
        self._is_cancelled = False
        self._is_to_give_way = False
        self._may_go = threading.Event()
        self._hold: Hold = BatonHold(baton)

    def look(self) -> None:
        """Raise `Cancelled` if the job is to stop."""
        if self._is_cancelled:
            raise Cancelled("the job was cancelled", hint=_AGAIN)

    def await_resume(self) -> None:
        """Say that the job is ready, and wait for its first turn; may raise `Cancelled`."""
        self._send(JobParked(job=self.job))
        self._may_go.wait()
        self.look()

    def take(self, hold: Hold | None = None) -> None:
        """Wait for the device, which the job has by `hold` from now on (default: by itself).

        Raises `Cancelled`, and is without it then.
        """
        self._hold = hold or self._hold
        if not self._hold.take():
            raise Cancelled("the job was cancelled before it began", hint=_AGAIN)

    def give_back(self) -> None:
        """The job needs the device no more."""
        self._hold.give_back()

    def at_border(self, aside: Aside, model: Shareable | None = None) -> None:
        """Go on, give way first, or raise `Cancelled`; holds the device before and after."""
        self.look()
        if self._is_to_give_way:
            self.is_better_shared = model is not None and model.is_better_shared
            self._give_way(aside)
        else:
            self._hold.lend()
        self.look()

    def _give_way(self, aside: Aside) -> None:
        self._is_to_give_way = False
        held_bytes = aside.leave()
        if held_bytes is None:
            self._send(JobStays(job=self.job))
            return
        # Cleared before it is said, since the answer may come at once.
        self._may_go.clear()
        if self._is_cancelled:
            self._may_go.set()
        told = JobParked(
            job=self.job, held_bytes=held_bytes, is_better_shared=self.is_better_shared
        )
        self._send(told)
        self._hold.give_back()
        self._may_go.wait()
        if self._is_cancelled or not self._hold.take():
            # Its frames unwind on the device: between two borders of whichever job has the turn.
            self._hold = BatonHold(self._baton)
            self._baton.take()
            self.look()
        aside.come_back()

    # --- what the receiving thread says ---------------------------------------------------------

    def cancel(self) -> None:
        self._is_cancelled = True
        self._may_go.set()
        self._hold.give_up()

    def ask_to_give_way(self) -> None:
        self._is_to_give_way = True

    def resume(self) -> None:
        self._may_go.set()


class Turns:
    """The jobs that are on this worker; what is said of another comes too late and does nothing."""

    def __init__(self, send: Send) -> None:
        self.baton = Baton()
        self._send = send
        self._jobs: dict[str, JobTurn] = {}

    def begin(self, job: str) -> JobTurn:
        """A job has come."""
        turn = self._jobs[job] = JobTurn(job, self.baton, self._send)
        return turn

    def end(self, job: str) -> None:
        """A job is about to be reported as ended."""
        self._jobs.pop(job, None)

    def cancel(self, job: str) -> None:
        """Stop a job at its next border, or where it waits."""
        if (turn := self._jobs.get(job)) is not None:
            turn.cancel()

    def give_way(self, job: str) -> None:
        """Park a job at its next border."""
        if (turn := self._jobs.get(job)) is not None:
            turn.ask_to_give_way()

    def resume(self, job: str) -> None:
        """Let a parked job go on as soon as the device is free."""
        if (turn := self._jobs.get(job)) is not None:
            turn.resume()
