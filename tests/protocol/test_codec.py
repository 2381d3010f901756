"""Messages survive the wire; bytes that are none give a coded error and nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_protocol import codec
from offload_protocol.errors import InvalidRequest, OffloadError, StorageFailed, TooLarge
from offload_protocol.limits import DEFAULT_LIMITS, Limits
from offload_protocol.messages import (
    REQUESTS,
    Error,
    Finished,
    Hello,
    Ping,
    Progress,
    Reply,
    Submit,
)
from offload_protocol.records import ErrorInfo, JobInfo, Outcome

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
argument_maps = st.dictionaries(st.text(max_size=9), plain, max_size=4)


@given(st.text(max_size=9), argument_maps, st.none() | st.integers(0, 1 << 63))
def test_requests_survive_the_wire(job: str, arguments: dict[str, Any], seed: int | None) -> None:
    request = Submit(rid=3, job=job, model="m", arguments=arguments, seed=seed)
    assert codec.decode_request(codec.encode(request), DEFAULT_LIMITS) == request


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "\ud800"},
        {"job": "\udcff"},
        {"arguments": {"prompt": "a \udcff circle"}},
        {"arguments": {"\udcff": 1}},
        {"seed": 1 << 64},
        {"seed": -(1 << 63) - 1},
    ],
)
def test_what_msgpack_cannot_hold_is_refused_before_it_is_sent(fields: dict[str, Any]) -> None:
    request = Submit(**{"rid": 3, "job": "j", "model": "m", "arguments": {}, **fields})
    with pytest.raises(InvalidRequest, match="cannot be sent") as caught:
        codec.encode(request)
    assert caught.value.hint


@pytest.mark.parametrize(
    "answer",
    [
        Reply(rid=1, result={"a": [1]}),
        Error(rid=None, error=ErrorInfo(code="busy", message="m", details={"retry_after_s": 1.5})),
        Progress(job="j", state="running", step=1, steps=4),
        Finished(job="j", state="done", outcome=Outcome(outputs={"images": []}, seeds=[1])),
    ],
)
def test_answers_survive_the_wire(answer: Reply | Error | Progress | Finished) -> None:
    assert codec.decode_answer(codec.encode(answer)) == answer


@given(st.binary(max_size=200))
def test_case_36_any_bytes_give_a_message_or_a_coded_error(body: bytes) -> None:
    with contextlib.suppress(OffloadError):
        codec.decode_request(body, DEFAULT_LIMITS)
    with contextlib.suppress(OffloadError):
        codec.decode_answer(body)


@given(argument_maps, st.integers(0, 200), st.integers(0, 255))
def test_case_36_damaged_messages_give_a_message_or_a_coded_error(
    arguments: dict[str, Any], place: int, value: int
) -> None:
    body = bytearray(codec.encode(Submit(rid=1, job="j", model="m", arguments=arguments)))
    body[place % len(body)] = value
    with contextlib.suppress(OffloadError):
        codec.decode_request(bytes(body), DEFAULT_LIMITS)


def test_case_36_nesting_beyond_the_interpreters_is_an_error() -> None:
    for body in (b"\x91" * 100_000 + b"\xc0", b"\x82\xa2op\xa4ping\xa1x" + b"\x91" * 100_000):
        with pytest.raises(codec.UnreadableRequest):
            codec.decode_request(body, DEFAULT_LIMITS)
        with pytest.raises(InvalidRequest):
            codec.decode_answer(body)


def test_a_body_over_the_limit_is_not_even_looked_at() -> None:
    with pytest.raises(TooLarge, match="11 bytes, the limit is 10"):
        codec.decode_request(b"\xc1" * 11, Limits(max_body_bytes=10))


def test_case_38_unknown_operations_are_refused_with_the_known_ones() -> None:
    body = msgspec.msgpack.encode({"op": "explode", "rid": 9})
    with pytest.raises(codec.UnreadableRequest, match=r"known are: cancel, .*hello") as caught:
        codec.decode_request(body, DEFAULT_LIMITS)
    assert caught.value.rid == 9


def test_case_38_unknown_fields_are_ignored() -> None:
    body = msgspec.msgpack.encode({"op": "ping", "rid": 9, "new": {"field": 1}})
    assert codec.decode_request(body, DEFAULT_LIMITS) == Ping(rid=9)


def test_every_operation_is_the_lower_case_name_of_its_message() -> None:
    assert REQUESTS["hello"] is Hello
    for op, request in REQUESTS.items():
        assert request.__struct_config__.tag == op


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(max_frames=2), "3 frames, the limit is 2"),
        (Limits(max_frame_bytes=4), "a frame has 5 bytes, the limit is 4"),
        (Limits(max_message_bytes=11), "12 bytes, the limit is 11"),
    ],
)
def test_frames_over_a_limit_are_refused(limits: Limits, says: str) -> None:
    frames = [b"12345", b"1234", b"123"]
    codec.check_frames(frames, DEFAULT_LIMITS)
    with pytest.raises(TooLarge, match=says):
        codec.check_frames(frames, limits)


def test_results_become_structs_or_say_what_differs() -> None:
    info = JobInfo(job="j", model="m", state="queued")
    assert codec.convert(codec.plain(info), JobInfo) == info
    with pytest.raises(InvalidRequest, match="another form than expected"):
        codec.convert({"job": 3}, JobInfo)


def test_an_error_that_quotes_what_no_message_holds_is_sent_all_the_same() -> None:
    found = ["config.json", "model_\udcff.safetensors"]
    error = StorageFailed(
        f"found: {found}",
        hint="rename \udcff",
        details={"found": found, "bytes": 1 << 70, "\udcff": None},
    )
    told = codec.encode(Error(rid=1, error=codec.error_info(error)))
    read = codec.decode_answer(told)
    assert isinstance(read, Error)
    assert r"model_\udcff.safetensors" in read.error.message
    assert read.error.hint == r"rename \udcff"
    assert read.error.details == {
        "found": ["config.json", r"model_\udcff.safetensors"],
        "bytes": str(1 << 70),
        r"\udcff": None,
    }
