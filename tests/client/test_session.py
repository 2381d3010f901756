"""The conversation as a table of messages and times; no socket, no clock."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from client.peer import finished, info_of
from hypothesis import given
from hypothesis import strategies as st

from offload_client.conversation import SILENCE_S
from offload_client.greeting import Introduction
from offload_client.pieces import WINDOW
from offload_client.records import MAX_EVENTS_KEPT, Call, JobRecord
from offload_client.session import MAX_HELLO_DEMANDS, Session
from offload_protocol.codec import decode_request, encode, plain
from offload_protocol.errors import (
    Busy,
    IdConflict,
    InvalidRequest,
    ProtocolMismatch,
    UnknownJob,
)
from offload_protocol.limits import DEFAULT_LIMITS, Limits
from offload_protocol.messages import (
    PROTOCOL_VERSION,
    Error,
    Fetch,
    Finished,
    Hello,
    Ping,
    Progress,
    Read,
    Reply,
    Stats,
    Submit,
    Taken,
)
from offload_protocol.records import ErrorInfo, Outcome, Welcome


def new_session(now: float = 0.0) -> Session:
    return Session(Introduction("me", "test", "1"), now, lambda: 0.0)


def sent(session: Session) -> list[Any]:
    """What went out since the last look."""
    requests = [decode_request(frames[0], DEFAULT_LIMITS) for frames in session.outbox]
    session.outbox.clear()
    return requests


def reply(session: Session, rid: int, result: Any, now: float = 0.0) -> None:
    data = plain(result) if isinstance(result, msgspec.Struct) else result
    session.receive([encode(Reply(rid=rid, result=data))], now)


def refuse(session: Session, rid: int | None, code: str, now: float = 0.0, **details: Any) -> None:
    info = ErrorInfo(code=code, message="no", details=details)
    session.receive([encode(Error(rid=rid, error=info))], now)


def greet(session: Session, now: float = 0.0, **welcome: Any) -> None:
    """A connection, its hello and the daemon's answer."""
    session.connection_made(now)
    (hello,) = sent(session)
    assert isinstance(hello, Hello)
    fields = {"version": PROTOCOL_VERSION, "daemon_version": "0", "instance": "i"}
    answer = msgspec.convert({**fields, "limits": {}, **welcome}, Welcome)
    reply(session, hello.rid, answer, now)


def ask(session: Session, now: float = 0.0) -> Call:
    return session.call(lambda rid: Stats(rid=rid), now)


def start(
    session: Session, job: str = "j", now: float = 0.0, deadline: float | None = None
) -> tuple[JobRecord, Call]:
    submit = Submit(rid=0, job=job, model="shapes", arguments={"prompt": "x"})
    return session.submit(submit, [b"frame"], now, patient=True, deadline=deadline)


def accept(session: Session, request: Any, state: str = "queued") -> None:
    reply(session, request.rid, info_of(request, state))


def test_nothing_is_sent_before_hello_is_answered() -> None:
    session = new_session()
    ask(session)
    assert sent(session) == []
    session.connection_made(1.0)
    ask(session)
    assert [type(request) for request in sent(session)] == [Hello]


def test_hello_introduces_the_client_and_its_version() -> None:
    session = new_session()
    session.connection_made(0.0)
    (hello,) = sent(session)
    assert (hello.version, hello.session, hello.program) == (PROTOCOL_VERSION, "me", "test")


def test_requests_made_before_the_greeting_go_out_after_it_in_their_order() -> None:
    session = new_session()
    first, second = ask(session), session.call(lambda rid: Ping(rid=rid), 0.0)
    greet(session)
    assert sent(session) == [first.request, second.request]


def test_an_answer_reaches_the_request_with_its_number() -> None:
    session = new_session()
    greet(session)
    first, second = ask(session), ask(session)
    reply(session, second.request.rid, {"n": 2})
    assert not first.done
    assert second.answer() == {"n": 2}


def test_an_error_becomes_the_exception_of_its_code() -> None:
    session = new_session()
    greet(session)
    call = ask(session)
    refuse(session, call.request.rid, "unknown_job", where="there")
    with pytest.raises(UnknownJob) as caught:
        call.answer()
    assert caught.value.details == {"where": "there"}


def test_the_daemons_limits_replace_the_default_ones() -> None:
    session = new_session()
    assert session.limits == DEFAULT_LIMITS
    greet(session, limits={"max_frames": 3, "of_the_future": 1})
    assert session.limits == Limits(max_frames=3)


def test_after_a_lost_connection_pending_requests_are_sent_again() -> None:
    session = new_session()
    greet(session)
    call = ask(session)
    assert sent(session) == [call.request]
    session.connection_lost(1.0)
    assert not session.ready
    greet(session, 2.0)
    assert sent(session) == [call.request]


def test_what_waits_to_be_sent_does_not_outlive_its_connection() -> None:
    session = new_session()
    greet(session)
    ask(session)
    session.connection_lost(1.0)
    assert not session.outbox


def test_an_unfinished_job_is_said_again_with_its_id_and_frames() -> None:
    session = new_session()
    greet(session)
    record, call = start(session)
    (submit,) = sent(session)
    accept(session, submit)
    assert call.done
    session.connection_lost(1.0)
    greet(session, 2.0, instance="another")
    assert session.outbox[0][1:] == [b"frame"]
    (again,) = sent(session)
    assert (again.job, again.arguments) == (record.id, submit.arguments)


def test_a_job_whose_submit_is_pending_is_not_said_twice() -> None:
    session = new_session()
    start(session)
    greet(session)
    assert len(sent(session)) == 1


def test_a_job_of_another_client_is_fetched_again() -> None:
    session = new_session()
    greet(session)
    _, call = session.follow("theirs", 0.0)
    (fetch,) = sent(session)
    accept(session, fetch, "running")
    assert call.done
    session.connection_lost(1.0)
    greet(session, 2.0)
    (again,) = sent(session)
    assert isinstance(again, Fetch)
    assert again.job == "theirs"


def test_a_finished_job_is_not_said_again() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    end, frame = finished("j")
    session.receive([encode(end), frame], 0.0)
    sent(session)
    greet(session, 1.0)
    assert sent(session) == []
    assert record.result_frames == (frame,)


def test_the_end_of_a_job_answers_its_submit_as_well() -> None:
    session = new_session()
    greet(session)
    _, call = start(session)
    end, frame = finished("j")
    session.receive([encode(end), frame], 0.0)
    assert call.done


def test_a_demand_for_hello_leads_to_hello_and_then_the_request_again() -> None:
    session = new_session()
    greet(session)
    call = ask(session)
    sent(session)
    refuse(session, call.request.rid, "protocol_mismatch", hello_required=True)
    (hello,) = sent(session)
    assert isinstance(hello, Hello)
    welcome = Welcome(
        version=PROTOCOL_VERSION, daemon_version="0", instance="j", limits=DEFAULT_LIMITS
    )
    reply(session, hello.rid, welcome)
    assert sent(session) == [call.request]
    assert not call.done


def test_two_demands_for_hello_at_once_lead_to_one_hello() -> None:
    session = new_session()
    greet(session)
    first, second = ask(session), ask(session)
    sent(session)
    refuse(session, first.request.rid, "protocol_mismatch", hello_required=True)
    refuse(session, second.request.rid, "protocol_mismatch", hello_required=True)
    assert [type(request) for request in sent(session)] == [Hello]


def test_a_daemon_that_is_never_content_with_hello_is_given_up() -> None:
    session = new_session()
    greet(session)
    call = ask(session)
    for _ in range(MAX_HELLO_DEMANDS):
        sent(session)
        refuse(session, call.request.rid, "protocol_mismatch", hello_required=True)
        (hello,) = sent(session)
        welcome = Welcome(version=1, daemon_version="0", instance="i", limits=DEFAULT_LIMITS)
        reply(session, hello.rid, welcome)
    refuse(session, call.request.rid, "protocol_mismatch", hello_required=True)
    with pytest.raises(ProtocolMismatch):
        call.answer()


def test_case_38_a_refused_hello_is_kept_as_the_reason() -> None:
    session = new_session()
    session.connection_made(0.0)
    (hello,) = sent(session)
    refuse(session, hello.rid, "protocol_mismatch", client=1, daemon=2)
    assert not session.ready
    assert isinstance(session.refusal, ProtocolMismatch)
    session.connection_lost(1.0)
    assert session.refusal is None, "the next daemon may be another"


def test_busy_is_waited_out_as_long_as_the_daemon_says() -> None:
    session = new_session()
    greet(session)
    _, call = start(session)
    (submit,) = sent(session)
    refuse(session, submit.rid, "busy", now=5.0, retry_after_s=2.0)
    assert not call.done
    assert session.next_due() == 7.0
    session.tick(6.9)
    assert sent(session) == []
    session.tick(7.0)
    assert [request.job for request in sent(session)] == ["j"]


def test_clients_do_not_return_from_busy_in_step() -> None:
    session = Session(Introduction("me", "", ""), 0.0, lambda: 1.0)
    greet(session)
    start(session)
    (submit,) = sent(session)
    refuse(session, submit.rid, "busy", now=0.0, retry_after_s=2.0)
    assert session.next_due() == 2.5


def test_busy_is_told_when_the_deadline_would_pass_meanwhile() -> None:
    session = new_session()
    greet(session)
    record, call = start(session, deadline=6.5)
    (submit,) = sent(session)
    refuse(session, submit.rid, "busy", now=5.0, retry_after_s=2.0)
    with pytest.raises(Busy):
        call.answer()
    assert record.ended
    assert not session.jobs


def test_busy_is_told_to_those_who_do_not_wait() -> None:
    session = new_session()
    greet(session)
    call = ask(session)
    refuse(session, call.request.rid, "busy", retry_after_s=1.0)
    with pytest.raises(Busy):
        call.answer()


@pytest.mark.parametrize("said", [None, "soon", -1, float("inf"), float("nan")])
def test_a_senseless_retry_time_is_bounded(said: object) -> None:
    session = new_session()
    greet(session)
    start(session)
    (submit,) = sent(session)
    refuse(session, submit.rid, "busy", retry_after_s=said)
    due = session.next_due()
    assert due is not None
    assert 0 < due <= 60


def test_after_a_loss_a_request_that_met_busy_keeps_its_time() -> None:
    session = new_session()
    greet(session)
    start(session)
    (submit,) = sent(session)
    refuse(session, submit.rid, "busy", now=1.0, retry_after_s=10.0)
    greet(session, 2.0)
    assert sent(session) == []
    session.tick(11.0)
    assert len(sent(session)) == 1


def test_a_job_that_a_new_daemon_refuses_ends_with_that_error() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    (submit,) = sent(session)
    accept(session, submit)
    greet(session, 1.0)
    (again,) = sent(session)
    refuse(session, again.rid, "unknown_model")
    failure = record.failure()
    assert failure is not None
    assert failure.code == "unknown_model"


def test_saying_an_id_again_for_something_else_does_not_end_the_first_job() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    (submit,) = sent(session)
    accept(session, submit)
    other = Submit(rid=0, job="j", model="another")
    same, call = session.submit(other, [], 0.0, patient=True, deadline=None)
    (second,) = sent(session)
    refuse(session, second.rid, "id_conflict")
    assert same is record
    assert not record.ended
    with pytest.raises(IdConflict):
        call.answer()


def test_progress_of_a_job_is_kept_in_its_order_without_repeats() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    for step in (0, 1, 1, 2):
        event = Progress(job="j", state="running", step=step, steps=2)
        session.receive([encode(event)], 0.0)
    events, seen = record.events_after(0)
    assert [event.step for event in events] == [0, 1, 2]
    assert record.events_after(seen) == ([], 3)


def test_a_reader_that_is_far_behind_loses_the_oldest_events_alone() -> None:
    record = JobRecord("j")
    for step in range(MAX_EVENTS_KEPT + 10):
        record.progressed(Progress(job="j", state="running", step=step))
    events, _ = record.events_after(0)
    assert len(events) == MAX_EVENTS_KEPT
    assert events[-1].step == MAX_EVENTS_KEPT + 9


def test_nothing_changes_after_the_end_of_a_job() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    end, frame = finished("j")
    session.receive([encode(end), frame], 0.0)
    session.receive([encode(Progress(job="j", state="running", step=1))], 0.0)
    failed = Finished(job="j", state="failed", error=ErrorInfo(code="internal", message="no"))
    session.receive([encode(failed)], 0.0)
    assert record.state == "done"
    assert record.failure() is None


def test_a_taken_job_is_told_to_the_daemon_once_and_forgotten() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    end, frame = finished("j")
    session.receive([encode(end), frame], 0.0)
    sent(session)
    session.take(record)
    session.take(record)
    assert [type(request) for request in sent(session)] == [Taken]
    assert not session.jobs


def test_a_taken_job_is_told_again_to_the_next_daemon() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    end, frame = finished("j")
    session.receive([encode(end), frame], 0.0)
    session.take(record)
    sent(session)
    session.connection_lost(1.0)
    session.connection_made(2.0)
    greet(session)
    assert [request.job for request in sent(session) if isinstance(request, Taken)] == ["j"]
    session.submit(Submit(rid=0, job="j", model="m"), (), 2.0, patient=False, deadline=None)
    session.connection_lost(3.0)
    session.connection_made(4.0)
    greet(session)
    assert not [request for request in sent(session) if isinstance(request, Taken)]


def test_silence_while_something_is_awaited_leads_to_one_ping() -> None:
    session = new_session()
    greet(session)
    ask(session)
    sent(session)
    assert session.next_due() == SILENCE_S
    session.tick(SILENCE_S)
    assert [type(request) for request in sent(session)] == [Ping]
    assert session.trouble_since == SILENCE_S
    session.tick(SILENCE_S + 1)
    assert sent(session) == []
    session.receive([encode(Progress(job="other", state="running"))], SILENCE_S + 2)
    assert session.trouble_since is None, "any word shows that the daemon is there"


def test_silence_is_no_trouble_while_nothing_is_awaited() -> None:
    session = new_session()
    greet(session)
    session.tick(1000.0)
    assert sent(session) == []
    assert session.next_due() is None


def test_a_refusal_without_number_belongs_to_the_only_request_under_way() -> None:
    session = new_session()
    greet(session)
    call = ask(session)
    refuse(session, None, "too_large")
    assert call.error is not None
    assert call.error.code == "too_large"


def test_a_refusal_without_number_among_several_requests_ends_none() -> None:
    session = new_session()
    greet(session)
    calls = [ask(session), ask(session)]
    refuse(session, None, "too_large")
    assert not any(call.done for call in calls)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80\x80", b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"hello"]
)
def test_case_36_a_malformed_message_neither_ends_nor_confuses_the_conversation(
    body: bytes,
) -> None:
    session = new_session()
    greet(session)
    first, second = ask(session), ask(session)
    session.receive([body], 0.0)
    reply(session, first.request.rid, {"n": 1})
    reply(session, second.request.rid, {"n": 2})
    assert (first.answer(), second.answer()) == ({"n": 1}, {"n": 2})


def test_a_greeting_that_is_not_understood_is_a_mismatch() -> None:
    session = new_session()
    session.connection_made(0.0)
    (hello,) = sent(session)
    reply(session, hello.rid, {"version": "one"})
    assert isinstance(session.refusal, ProtocolMismatch)


def test_an_answer_of_another_form_is_an_error_of_that_request() -> None:
    session = new_session()
    greet(session)
    record, call = start(session)
    (submit,) = sent(session)
    reply(session, submit.rid, {"job": 5})
    with pytest.raises(InvalidRequest):
        call.answer()
    assert record.ended


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.integers(0, 3))
def test_no_bytes_from_a_peer_raise(frames: list[bytes], pending: int) -> None:
    session = new_session()
    greet(session)
    for _ in range(pending):
        ask(session)
    session.receive(frames, 0.0)
    assert session.ready


@given(st.lists(st.sampled_from(["lose", "greet", "ask", "start", "answer"]), max_size=40))
def test_each_request_and_job_is_under_way_at_most_once_per_connection(steps: list[str]) -> None:
    session = new_session()
    on_wire: list[Any] = []
    now, jobs = 0.0, 0
    for step in steps:
        now += 0.01
        if step == "lose":
            session.connection_lost(now)
            on_wire.clear()
        elif step == "greet":
            on_wire.clear()
            greet(session, now)
        elif step == "ask":
            ask(session, now)
        elif step == "start":
            start(session, f"job {jobs}", now)
            jobs += 1
        elif on_wire and session.ready:
            request = on_wire.pop()
            result: Any = info_of(request, "running") if isinstance(request, Submit) else {}
            reply(session, request.rid, result, now)
        on_wire += sent(session) if session.ready else []
        names = [getattr(request, "job", request.rid) for request in on_wire]
        assert len(names) == len(set(names))
    greet(session, now + 1)
    said = {request.job for request in sent(session) if isinstance(request, Submit)}
    assert said == set(session.jobs), "every unfinished job is said after a greeting"


def farewell(job: str) -> bytes:
    info = ErrorInfo(code="shutting_down", message="the daemon is stopping")
    return encode(Finished(job=job, state="failed", error=info))


def test_a_job_that_a_stopping_daemon_ends_is_said_to_the_next_one() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    (submit,) = sent(session)
    accept(session, submit, "running")
    session.receive([farewell("j")], 1.0)
    assert not record.ended
    session.connection_lost(1.1)
    greet(session, 2.0)
    assert [request.job for request in sent(session)] == ["j"]
    end, frame = finished("j")
    session.receive([encode(end), frame], 3.0)
    assert record.failure() is None


def test_a_daemon_that_remembers_such_an_end_is_believed() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    session.receive([farewell("j")], 1.0)
    greet(session, 2.0)
    session.receive([farewell("j")], 3.0)
    failure = record.failure()
    assert failure is not None
    assert failure.code == "shutting_down"


def large_end(sizes: list[int], job: str = "j") -> Finished:
    return Finished(job=job, state="done", outcome=Outcome(outputs={}, seeds=[1]), sizes=sizes)


def give(session: Session, request: Read, frames: list[bytes], now: float = 0.0) -> None:
    piece_bytes = DEFAULT_LIMITS.max_piece_bytes
    piece = frames[request.frame][request.offset : request.offset + piece_bytes]
    session.receive([encode(Reply(rid=request.rid, result={})), piece], now)


def test_a_large_result_is_asked_for_in_pieces_a_few_at_a_time() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    accept(session, sent(session)[0])
    piece_bytes = DEFAULT_LIMITS.max_piece_bytes
    frames = [os.urandom(5 * piece_bytes + 1), b"", b"tail"]
    session.receive([encode(large_end([len(frame) for frame in frames]))], 0.0)
    waiting = sent(session)
    assert len(waiting) == WINDOW
    asked = []
    while waiting:
        asked.append((waiting[0].frame, waiting[0].offset))
        assert not record.ended
        give(session, waiting.pop(0), frames)
        waiting += sent(session)
        assert len(waiting) <= WINDOW
    assert asked == [(0, index * piece_bytes) for index in range(6)] + [(2, 0)]
    assert record.finished is not None
    assert [bytes(frame) for frame in record.result_frames] == frames
    assert all(memoryview(frame).readonly for frame in record.result_frames)


def test_pieces_that_were_under_way_are_asked_for_again_after_a_loss() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    accept(session, sent(session)[0])
    piece_bytes = DEFAULT_LIMITS.max_piece_bytes
    frames = [os.urandom(3 * piece_bytes)]
    session.receive([encode(large_end([3 * piece_bytes]))], 0.0)
    give(session, sent(session)[1], frames)
    session.connection_lost(1.0)
    greet(session, 2.0)
    waiting = sent(session)
    assert [request.offset for request in waiting] == [0, 2 * piece_bytes]
    for request in waiting:
        give(session, request, frames)
    assert [bytes(frame) for frame in record.result_frames] == frames


@pytest.mark.parametrize("piece", [None, b"", b"x" * 3])
def test_a_piece_that_is_not_as_long_as_announced_fails_the_job(piece: bytes | None) -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    accept(session, sent(session)[0])
    session.receive([encode(large_end([2_000_000]))], 0.0)
    reading = sent(session)[0]
    behind = [] if piece is None else [piece]
    session.receive([encode(Reply(rid=reading.rid, result={})), *behind], 0.0)
    assert isinstance(record.failure(), InvalidRequest)


def test_a_result_that_gave_way_while_it_was_read_fails_with_the_daemons_words() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    accept(session, sent(session)[0])
    session.receive([encode(large_end([2_000_000]))], 0.0)
    refuse(session, sent(session)[0].rid, "storage_failed")
    failure = record.failure()
    assert failure is not None
    assert failure.code == "storage_failed"


def test_a_result_larger_than_any_message_is_not_begun() -> None:
    session = new_session()
    greet(session)
    record, _ = start(session)
    accept(session, sent(session)[0])
    session.receive([encode(large_end([1 << 40]))], 0.0)
    assert sent(session) == []
    assert isinstance(record.failure(), InvalidRequest)
