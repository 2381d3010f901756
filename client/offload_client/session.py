"""The conversation with a daemon, without I/O: frames and times go in, frames come out.

What it keeps, whatever order connections, answers and losses come in:

1. Every connection begins with hello, and nothing else is sent before hello is answered.
2. A request is pending until it is answered. After each answered hello all that are pending are
   sent, again where they were sent before: each may be said twice without further effect.
3. A job that was accepted and has not ended is said again after each answered hello, under its own
   id. The daemon runs an id once, so a job outlives both a lost connection and a new daemon.
4. A message that cannot be matched is dropped; it never ends the conversation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from offload_client.backoff import retry_time
from offload_client.greeting import Introduction
from offload_client.pieces import WINDOW, Pieces
from offload_client.records import Call, JobRecord, Watched
from offload_protocol.codec import convert, decode_answer, encode, to_exception
from offload_protocol.errors import (
    Busy,
    ErrorCode,
    InvalidRequest,
    OffloadError,
    ProtocolMismatch,
    Unauthorized,
)
from offload_protocol.limits import DEFAULT_LIMITS, Limits
from offload_protocol.messages import (
    Error,
    Fetch,
    Finished,
    JobInfo,
    Ping,
    Progress,
    Read,
    Reply,
    Request,
    Submit,
    Taken,
    Welcome,
)
from offload_protocol.values import Frame

Build = Callable[[int], Request]
"""Makes a request from its number."""

SILENCE_S = 10.0
"""After this long without a word from the daemon, while something is awaited, it is pinged."""

MAX_HELLO_DEMANDS = 3
"""A daemon that asks for hello more often for one request will never be content."""


class Session(Watched):
    """State of one client's conversation. Not safe from threads; times are monotonic seconds."""

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
        self._active_at = now

    # --- what others ask ------------------------------------------------------------------------

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
            due.append(self._active_at + SILENCE_S)
        return min(due, default=None)

    # --- what the transport reports -------------------------------------------------------------

    def connection_made(self, now: float) -> None:
        """A connection stands: say hello on it."""
        self.connected = True
        self._lose(now)
        self.refusal = None
        self._last_rid += 1
        self._hello_rid = self._last_rid
        self._active_at = now
        self.outbox.append([encode(self._introduction.hello(self._hello_rid))])
        self.changed()

    def turned_away(self, error: OffloadError) -> None:
        """The other end refuses to talk at all."""
        self.refusal = error
        self.changed()

    def connection_lost(self, now: float) -> None:
        """The connection is gone, and with it all that was under way."""
        self.connected = False
        self._lose(now)
        self.changed()

    def receive(self, frames: Sequence[Frame], now: float) -> None:
        """A message came."""
        self._active_at = self.heard_at = now
        self._end_ping()
        try:
            answer = decode_answer(frames[0])
        except InvalidRequest as error:
            self._unmatched(ProtocolMismatch(error.message, hint="is it an offloadd daemon?"))
            return
        if isinstance(answer, Reply):
            self._replied(answer, frames[1:], now)
        elif isinstance(answer, Error):
            self._refused(answer, now)
        elif (record := self.jobs.get(answer.job)) is not None:
            if isinstance(answer, Progress):
                record.progressed(answer)
            else:
                self._finished(record, answer, frames[1:], now)

    def tick(self, now: float) -> None:
        """Do what is due: repeat requests that met `busy`, break a long silence."""
        for call in tuple(self._pending.values()):
            if call.retry_at is not None and call.retry_at <= now:
                call.retry_at = None
                self._send(call, now)
        silent = now - self._active_at >= SILENCE_S
        if silent and self._ping is None and self._awaits_word():
            self._pinged_at = now
            self._ping = self.call(lambda rid: Ping(rid=rid), now)
            self.changed()

    # --- what the program wants -----------------------------------------------------------------

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

    def submit(
        self,
        submit: Submit,
        frames: Sequence[Frame],
        now: float,
        *,
        patient: bool,
        deadline: float | None,
    ) -> tuple[JobRecord, Call]:
        """Queue a job and follow it; `submit.rid` is replaced."""
        known = self.jobs.get(submit.job)
        if known is not None:
            # The daemon judges whether it is the same request; its refusal must not end the job.
            again = self.call(lambda rid: _renumbered(submit, rid), now, frames=frames)
            return known, again
        record = JobRecord(submit.job, submit=submit, frames=frames)
        self.jobs[record.id] = record
        return record, self._say(record, now, patient=patient, deadline=deadline)

    def follow(self, job: str, now: float) -> tuple[JobRecord, Call]:
        """Ask for a job that was queued earlier, and follow it."""
        record = self.jobs.setdefault(job, JobRecord(job))
        return record, self._say(record, now, patient=False, deadline=None)

    def abandon(self, call: Call) -> None:
        """Forget a request whose answer nobody awaits any longer."""
        self._pending.pop(_rid(call), None)

    def forget(self, record: JobRecord) -> None:
        """Follow a job no longer; requests about it that are pending are dropped."""
        self.jobs.pop(record.id, None)
        for rid in [rid for rid, call in self._pending.items() if call.record is record]:
            del self._pending[rid]

    def take(self, record: JobRecord, now: float) -> None:
        """Tell the daemon that the job's result has been handed to the program."""
        if self.jobs.pop(record.id, None) is None:
            return
        if self.ready:
            # Without an answer: if this is lost, the daemon keeps the result until its time is up.
            self._last_rid += 1
            taken = Taken(rid=self._last_rid, job=record.id, quiet=True)
            self.outbox.append([encode(taken)])
        else:
            self.call(lambda rid: Taken(rid=rid, job=record.id), now)

    # --- answers --------------------------------------------------------------------------------

    def _replied(self, reply: Reply, frames: Sequence[Frame], now: float) -> None:
        if reply.rid == self._hello_rid:
            self._welcomed(reply, now)
            return
        call = self._pending.pop(reply.rid, None)
        if call is None:
            return
        if call.record is not None and call.place is not None:
            self._piece_came(call, call.record, frames, now)
            return
        if call.record is not None:
            try:
                call.record.described(convert(reply.result, JobInfo))
            except InvalidRequest as error:
                self._settle(call, error)
                return
        call.result = reply.result
        call.changed()

    def _welcomed(self, reply: Reply, now: float) -> None:
        try:
            self.welcome = convert(reply.result, Welcome)
        except InvalidRequest as error:
            self.refusal = ProtocolMismatch(f"the daemon's greeting is not understood: {error}")
            self.changed()
            return
        self._hello_rid = self._lost_at = None
        for call in tuple(self._pending.values()):
            if call.retry_at is None:
                self._send(call, now)
        asked = {call.record.id for call in self._pending.values() if call.record}
        for record in self.jobs.values():
            if not record.ended and record.id not in asked:
                self._say(record, now, patient=True, deadline=None)
        self.changed()

    def _refused(self, answer: Error, now: float) -> None:
        error = to_exception(answer.error)
        if answer.rid is not None and answer.rid == self._hello_rid:
            self.refusal = error
            self.changed()
            return
        call = self._pending.get(answer.rid) if answer.rid is not None else None
        wants_hello = isinstance(error, ProtocolMismatch) and error.details.get("hello_required")
        if wants_hello and (call is None or call.hello_demands < MAX_HELLO_DEMANDS):
            if call is not None:
                call.hello_demands += 1
            # Several requests may be refused before the first hello is answered; one is enough.
            if self.ready:
                self.connection_made(now)
        elif call is None:
            self._unmatched(error)
        else:
            self._turned_away(call, error, now)

    def _turned_away(self, call: Call, error: OffloadError, now: float) -> None:
        retry_at = None
        if call.patient and isinstance(error, Busy):
            retry_at = retry_time(error, now, call.deadline, self._random)
        if retry_at is None:
            self._settle(call, error)
        else:
            call.retry_at, call.sent = retry_at, False

    def _unmatched(self, error: OffloadError) -> None:
        """A refusal of nobody knows what: it must be the one request under way, if it is one."""
        if self._hello_rid is not None:
            self.refusal = error
            self.changed()
            return
        waiting = [call for call in self._pending.values() if call.sent]
        if len(waiting) == 1:
            self._settle(waiting[0], error)

    def _settle(self, call: Call, error: OffloadError) -> None:
        self._pending.pop(_rid(call), None)
        call.error = error
        if call.record is not None and isinstance(call.request, (Submit, Fetch, Read)):
            self.jobs.pop(call.record.id, None)
            call.record.fails(error)
        call.changed()

    def _finished(
        self, record: JobRecord, finished: Finished, frames: Sequence[Frame], now: float
    ) -> None:
        if _is_farewell(finished) and record.submit is not None and record.farewell is None:
            # The job is said again to the next daemon. Once only: a daemon may remember this end.
            record.farewell = finished
            return
        if not finished.sizes:
            self._ended(record, finished, frames)
        elif record.pieces is None and not record.ended:
            try:
                limits = self.limits
                record.pieces = Pieces(finished, limits.max_piece_bytes, limits.max_message_bytes)
            except InvalidRequest as error:
                record.fails(error)
                return
            self._ask_for_pieces(record, record.pieces, WINDOW, now)

    def _ask_for_pieces(self, record: JobRecord, pieces: Pieces, count: int, now: float) -> None:
        for place in pieces.to_ask(count):
            frame, offset = place
            call = self.call(_reading(record.id, frame, offset), now, record=record)
            call.place = place

    def _piece_came(
        self, call: Call, record: JobRecord, frames: Sequence[Frame], now: float
    ) -> None:
        pieces = record.pieces
        if pieces is None or call.place is None:
            return
        try:
            pieces.came(call.place, frames[0] if frames else b"")
        except InvalidRequest as error:
            self._settle(call, error)
            return
        if pieces.are_all_there:
            self._ended(record, pieces.finished, pieces.frames())
        else:
            self._ask_for_pieces(record, pieces, 1, now)

    def _ended(self, record: JobRecord, finished: Finished, frames: Sequence[Frame]) -> None:
        record.ends(finished, frames)
        # An answer to Submit that is still awaited is no longer needed.
        for call in tuple(self._pending.values()):
            if call.record is record and isinstance(call.request, Submit):
                del self._pending[_rid(call)]
                call.result = {}
                call.changed()

    # --- sending --------------------------------------------------------------------------------

    def _say(self, record: JobRecord, now: float, *, patient: bool, deadline: float | None) -> Call:
        submit = record.submit
        if submit is None:
            return self.call(lambda rid: Fetch(rid=rid, job=record.id), now, record=record)
        return self.call(
            lambda rid: _renumbered(submit, rid),
            now,
            frames=record.frames,
            record=record,
            patient=patient,
            deadline=deadline,
        )

    def _send(self, call: Call, now: float) -> None:
        if not self.ready:
            return
        call.sent = True
        self._active_at = now
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


def _is_farewell(finished: Finished) -> bool:
    return finished.error is not None and finished.error.code == ErrorCode.SHUTTING_DOWN


def _rid(call: Call) -> int:
    return call.request.rid


def _renumbered(submit: Submit, rid: int) -> Submit:
    return msgspec.structs.replace(submit, rid=rid)


def _reading(job: str, frame: int, offset: int) -> Build:
    return lambda rid: Read(rid=rid, job=job, frame=frame, offset=offset)
