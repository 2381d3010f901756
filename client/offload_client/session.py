"""The conversation with a daemon, without I/O: frames and times go in, frames come out.

What it keeps beside what every `Conversation` does, whatever order connections, answers and losses
come in:

1. A job that was accepted and has not ended is said again after each answered hello, under its own
   id. The daemon runs an id once, so a job outlives both a lost connection and a new daemon.
2. A message that cannot be matched is dropped; it never ends the conversation.
3. That a result was taken is not answered, but said again to the next daemon: the one that it was
   said to may have died before it heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from offload_client.backoff import retry_time
from offload_client.conversation import Build, Conversation
from offload_client.greeting import Introduction
from offload_client.pieces import WINDOW, Pieces
from offload_client.records import Call, JobRecord
from offload_protocol.codec import convert, decode_answer, encode, to_exception
from offload_protocol.errors import (
    Busy,
    ErrorCode,
    InvalidRequest,
    OffloadError,
    ProtocolMismatch,
)
from offload_protocol.messages import Error, Fetch, Finished, Progress, Read, Reply, Submit, Taken
from offload_protocol.records import FINAL_STATES, JobInfo, Welcome
from offload_protocol.values import Frame

REMEMBERED_TAKEN = 64
"""More than a client takes between a daemon's death and hearing of it."""

MAX_HELLO_DEMANDS = 3
"""A daemon that asks for hello more often for one request will never be content."""


class Session(Conversation):
    """State of one client's conversation. Not safe from threads; times are monotonic seconds."""

    def __init__(self, introduction: Introduction, now: float, random: Callable[[], float]) -> None:
        super().__init__(introduction, now, random)
        self._taken: deque[str] = deque(maxlen=REMEMBERED_TAKEN)

    def receive(self, frames: Sequence[Frame], now: float) -> None:
        """A message came."""
        self.active_at = self.heard_at = now
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
                record.progressed(answer, frames[1:])
            else:
                self._finished(record, answer, frames[1:], now)

    # --- what the program wants -----------------------------------------------------------------

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
        if submit.job in self._taken:
            self._taken.remove(submit.job)
        record = JobRecord(submit.job, submit=submit, frames=frames)
        self.jobs[record.id] = record
        return record, self._say(record, now, patient=patient, deadline=deadline)

    def follow(self, job: str, now: float) -> tuple[JobRecord, Call]:
        """Ask for a job that was queued earlier, and follow it."""
        record = self.jobs.setdefault(job, JobRecord(job))
        return record, self._say(record, now, patient=False, deadline=None)

    def forget(self, record: JobRecord) -> None:
        """Follow a job no longer; requests about it that are pending are dropped."""
        self.jobs.pop(record.id, None)
        for rid in [rid for rid, call in self._pending.items() if call.record is record]:
            del self._pending[rid]

    def take(self, record: JobRecord) -> None:
        """Tell the daemon that the job's result has been handed to the program."""
        if self.jobs.pop(record.id, None) is None:
            return
        self._taken.append(record.id)
        if self.ready:
            self._tell_taken(record.id)

    def _tell_taken(self, job: str) -> None:
        self._last_rid += 1
        self.outbox.append([encode(Taken(rid=self._last_rid, job=job, quiet=True))])

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
        if call.record is not None and not _has_ended(reply, call.record):
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
        for job in self._taken:
            self._tell_taken(job)
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


def _has_ended(reply: Reply, record: JobRecord) -> bool:
    """Whether an answer about a job whose model is known says nothing that its end does not."""
    return bool(record.model) and reply.result.get("state") in FINAL_STATES


def _is_farewell(finished: Finished) -> bool:
    return finished.error is not None and finished.error.code == ErrorCode.SHUTTING_DOWN


def _rid(call: Call) -> int:
    return call.request.rid


def _renumbered(submit: Submit, rid: int) -> Submit:
    return msgspec.structs.replace(submit, rid=rid)


def _reading(job: str, frame: int, offset: int) -> Build:
    return lambda rid: Read(rid=rid, job=job, frame=frame, offset=offset)
