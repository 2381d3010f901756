"""What waits for one client that reads too slowly: bounded bytes, progress given up first.

Results are not held here, only named: their bytes stay in the results store until they are taken or
expire, so a client that never reads costs the daemon this outbox and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

MAX_REPLIES_BYTES = 6 << 20
"""Answers held for a client that asks without reading; further ones are dropped and counted.

More than the pieces of results that a client is allowed to have under way.
"""

MAX_PROGRESSES = 256
"""Jobs whose latest progress is held."""


class Outcome(Enum):
    """What became of something that was handed to the outbox."""

    KEPT = auto()
    DROPPED = auto()


Parts = tuple[bytes | bytearray | memoryview, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The next thing to send: a message's parts, or the key of a job whose end is to be sent."""

    parts: Parts = ()
    finished: str | None = None


class Outbox:
    """Answers first, then ends of jobs, then the latest progress of each job."""

    def __init__(self) -> None:
        self._replies: deque[Parts] = deque()
        self._replies_bytes = 0
        self._finished: dict[str, None] = {}
        self._progress: dict[str, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._replies or self._finished or self._progress)

    @property
    def held_bytes(self) -> int:
        """Bytes of the encoded messages that wait here."""
        return self._replies_bytes + sum(len(body) for body in self._progress.values())

    def add_reply(self, parts: Parts) -> Outcome:
        """Hold an answer, unless this client has left too many unread."""
        size_bytes = _size_bytes(parts)
        if self._replies and self._replies_bytes + size_bytes > MAX_REPLIES_BYTES:
            return Outcome.DROPPED
        self._replies.append(parts)
        self._replies_bytes += size_bytes
        return Outcome.KEPT

    def add_progress(self, job: str, body: bytes) -> Outcome:
        """Hold a job's progress in place of its earlier one."""
        if job in self._finished:
            return Outcome.DROPPED
        outcome = Outcome.DROPPED if job in self._progress else Outcome.KEPT
        if outcome is Outcome.KEPT and len(self._progress) >= MAX_PROGRESSES:
            return Outcome.DROPPED
        self._progress[job] = body
        return outcome

    def add_finished(self, job: str) -> None:
        """Remember that a job's end is to be sent; its progress no longer matters."""
        self._progress.pop(job, None)
        self._finished[job] = None

    def forget(self, job: str) -> None:
        """Send nothing more about a job."""
        self._progress.pop(job, None)
        self._finished.pop(job, None)

    def flush(self, send: Callable[[Waiting], bool]) -> None:
        """Send until nothing is left or `send` says that no more can go."""
        while self._replies:
            if not send(Waiting(self._replies[0])):
                return
            self._replies_bytes -= _size_bytes(self._replies.popleft())
        while self._finished:
            job = next(iter(self._finished))
            if not send(Waiting(finished=job)):
                return
            self._finished.pop(job, None)
        while self._progress:
            job = next(iter(self._progress))
            if not send(Waiting((self._progress[job],))):
                return
            del self._progress[job]


def _size_bytes(parts: Parts) -> int:
    return sum(len(part) for part in parts)
