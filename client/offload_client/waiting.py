"""How long a caller waits, and the sentence it gets when the wait is over; pure."""

from __future__ import annotations

from dataclasses import dataclass

from offload_client.session import Session
from offload_protocol.errors import OffloadError, TimedOut
from offload_protocol.sizes import format_duration


class ConnectionMissing(Exception):
    """The time allowed without a working connection is over; the client says what is in the way."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(waited_s)
        self.waited_s = waited_s


@dataclass(frozen=True, slots=True)
class Wait:
    """One caller's patience. Times are monotonic seconds."""

    what: str
    """What is awaited, as the subject of a sentence."""
    started_at: float
    timeout_s: float | None
    """In all; None is without end, as long as the daemon is there."""
    grace_s: float
    """How long a missing connection is waited out."""

    @property
    def deadline(self) -> float | None:
        """When the whole wait ends."""
        return None if self.timeout_s is None else self.started_at + self.timeout_s

    def check(self, session: Session, now: float) -> None:
        """Raise what the wait has to end with, if it has to end.

        `TimedOut` at the deadline, the daemon's own error where hello was refused,
        `ConnectionMissing` when there was no working connection for `grace_s`.
        """
        if session.refusal is not None:
            raise session.refusal
        give_up_at = self._give_up_at(session)
        if give_up_at is not None and now >= give_up_at:
            raise ConnectionMissing(now - max(self.started_at, session.trouble_since or 0))
        if self.deadline is not None and now >= self.deadline:
            raise self._timed_out(session, now)

    def next_check(self, session: Session) -> float | None:
        """The latest time at which `check` must be asked again."""
        times = (self.deadline, self._give_up_at(session), session.next_due())
        return min((time for time in times if time is not None), default=None)

    def _give_up_at(self, session: Session) -> float | None:
        since = session.trouble_since
        return None if since is None else max(since, self.started_at) + self.grace_s

    def _timed_out(self, session: Session, now: float) -> OffloadError:
        limit_s = self.timeout_s or 0.0
        silent_s = now - session.heard_at
        silence = (
            f"nothing was heard from the daemon for {format_duration(silent_s)}"
            if silent_s >= min(1.0, limit_s)
            else "the daemon is there and busy with it"
        )
        return TimedOut(
            f"{self.what} did not come within {format_duration(limit_s)}; {silence}",
            hint="allow more with timeout_s"
            if silent_s < 1.0
            else "it may be stopped or overloaded",
            details={"timeout_s": limit_s, "silent_s": silent_s},
        )
