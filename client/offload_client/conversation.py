"""What a client's conversation keeps whatever is talked about: connection, requests, silence.

1. Every connection begins with hello, and nothing else is sent before hello is answered.
2. A request is pending until it is answered. After each answered hello all that are pending are
   sent, again where they were sent before: each may be said twice without further effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from offload_client.greeting import Introduction
from offload_client.records import Call, JobRecord, Watched
from offload_protocol.codec import encode
from offload_protocol.errors import OffloadError, Unauthorized
from offload_protocol.limits import DEFAULT_LIMITS, Limits
from offload_protocol.messages import Ping, Request
from offload_protocol.records import Welcome
from offload_protocol.values import Frame

Build = Callable[[int], Request]
"""Makes a request from its number."""

SILENCE_S = 10.0
"""After this long without a word from the daemon, while something is awaited, it is pinged."""


class Conversation(Watched):
    """Connection and requests of one client. Not safe from threads; times are monotonic seconds."""

    def __init__(self, introduction: Introduction, now: float, random: Callable[[], float]) -> None:
        super().__init__()
        self.outbox: deque[list[Frame]] = deque()
        self.jobs: dict[str, JobRecord] = {}
        self.welcome: Welcome | None = None
        self.refusal: OffloadError | None = None
        """Why hello was refused on the present connection."""
        self.connected = False
        self.heard_at = now
        """When the last message came, or the session began."""
        self._introduction = introduction
        self._random = random
        self._pending: dict[int, Call] = {}
        self._last_rid = 0
        self._hello_rid: int | None = None
        self._lost_at: float | None = now
        self._ping: Call | None = None
        self._pinged_at: float | None = None
        self.active_at = now
        """When something was last sent or heard."""

    @property
    def ready(self) -> bool:
        """Whether hello is answered, so that requests go out at once."""
        return self._lost_at is None

    @property
    def limits(self) -> Limits:
        """What the daemon takes, as it last said."""
        return self.welcome.limits if self.welcome else DEFAULT_LIMITS

    @property
    def trouble_since(self) -> float | None:
        """Since when there is no working conversation, or a ping stands unanswered."""
        if self._lost_at is not None:
            return self._lost_at
        return self._pinged_at

    def next_due(self) -> float | None:
        """When `tick` has something to do, if nothing arrives before."""
        due = [call.retry_at for call in self._pending.values() if call.retry_at is not None]
        if self._ping is None and self._awaits_word():
            due.append(self.active_at + SILENCE_S)
        return min(due, default=None)

    # --- what the transport reports -------------------------------------------------------------

    def connection_made(self, now: float) -> None:
        """A connection stands: say hello on it."""
        self.connected = True
        self._lose(now)
        self.refusal = None
        self._last_rid += 1
        self._hello_rid = self._last_rid
        self.active_at = now
        self.outbox.append([encode(self._introduction.hello(self._hello_rid))])
        self.changed()

    def ask_again(self, now: float) -> None:
        """Say hello once more to a daemon that did not allow this client: it may do so now."""
        if isinstance(self.refusal, Unauthorized) and self.connected:
            self.connection_made(now)

    def turned_away(self, error: OffloadError) -> None:
        """The other end refuses to talk at all."""
        self.refusal = error
        self.changed()

    def connection_lost(self, now: float) -> None:
        """The connection is gone, and with it all that was under way."""
        self.connected = False
        self._lose(now)
        self.changed()

    def tick(self, now: float) -> None:
        """Do what is due: repeat requests that met `busy`, break a long silence."""
        for call in tuple(self._pending.values()):
            if call.retry_at is not None and call.retry_at <= now:
                call.retry_at = None
                self._send(call, now)
        silent = now - self.active_at >= SILENCE_S
        if silent and self._ping is None and self._awaits_word():
            self._pinged_at = now
            self._ping = self.call(lambda rid: Ping(rid=rid), now)
            self.changed()

    # --- requests -------------------------------------------------------------------------------

    def call(
        self,
        build: Build,
        now: float,
        *,
        frames: Sequence[Frame] = (),
        record: JobRecord | None = None,
        patient: bool = False,
        deadline: float | None = None,
    ) -> Call:
        """Ask something; it is sent at once or as soon as there is a conversation."""
        self._last_rid += 1
        call = Call(
            build(self._last_rid), frames, record=record, patient=patient, deadline=deadline
        )
        self._pending[self._last_rid] = call
        self._send(call, now)
        return call

    def abandon(self, call: Call) -> None:
        """Forget a request whose answer nobody awaits any longer."""
        self._pending.pop(call.request.rid, None)

    def _send(self, call: Call, now: float) -> None:
        if not self.ready:
            return
        call.sent = True
        self.active_at = now
        self.outbox.append([encode(call.request), *call.frames])

    def _lose(self, now: float) -> None:
        self.outbox.clear()
        if not isinstance(self.refusal, Unauthorized):
            # Who is not let in hears the door close as well; the reason stands until it opens.
            self.refusal = None
        self._hello_rid = None
        if self._lost_at is None:
            self._lost_at = now
        self._end_ping()
        for call in self._pending.values():
            call.sent = False

    def _end_ping(self) -> None:
        if self._ping is not None:
            self.abandon(self._ping)
        self._ping = self._pinged_at = None

    def _awaits_word(self) -> bool:
        if not self.ready:
            return False
        asks = any(call.retry_at is None for call in self._pending.values())
        return asks or any(not record.ended for record in self.jobs.values())
