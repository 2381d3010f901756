"""Messages to bytes and back; bytes from a peer raise a coded error or give a typed message.

msgspec checks types while it decodes and does not allocate for lengths that are only claimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from offload_protocol.errors import InvalidRequest, OffloadError, TooLarge, from_code
from offload_protocol.limits import Limits
from offload_protocol.messages import REQUESTS, Answer, Error, Finished, Progress, Reply, Request
from offload_protocol.records import ErrorInfo

Message = TypeVar("Message", bound=msgspec.Struct)

# Deep nesting ends in RecursionError, bad UTF-8 in UnicodeDecodeError: both are the peer's fault.
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError)

# Half a character (a file name or a command line that is not UTF-8), or an integer too long.
UNSENDABLE = (UnicodeEncodeError, OverflowError)


class _Envelope(msgspec.Struct):
    op: str
    rid: int


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_request_decoders = {op: msgspec.msgpack.Decoder(request) for op, request in REQUESTS.items()}
_answer_decoder: msgspec.msgpack.Decoder[Reply | Error | Progress | Finished] = (
    msgspec.msgpack.Decoder(Reply | Error | Progress | Finished)
)


class UnreadableRequest(InvalidRequest):
    """Bytes that are no request; `rid` is the request's number where that much could be read."""

    def __init__(self, message: str, *, rid: int | None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rid = rid


def encode(message: msgspec.Struct) -> bytes:
    """The msgpack body of a message; raises `InvalidRequest` for what msgpack cannot hold."""
    try:
        return _encoder.encode(message)
    except UNSENDABLE as error:
        raise InvalidRequest(
            f"the message cannot be sent: {error}",
            hint="texts are Unicode without lone surrogates, integers have 64 bits",
        ) from None


def decode_request(body: bytes | memoryview, limits: Limits) -> Request:
    """Read a request from a peer.

    Raises `TooLarge` over `limits.max_body_bytes`, else `UnreadableRequest`.
    """
    if len(body) > limits.max_body_bytes:
        raise TooLarge(
            f"the message body has {len(body)} bytes, the limit is {limits.max_body_bytes}",
            hint="send arrays and images as frames of their own",
        )
    try:
        envelope = _envelope_decoder.decode(body)
    except UNREADABLE as error:
        raise UnreadableRequest(
            f"the message is not a request: {error}",
            rid=None,
            hint="the first frame is one msgpack map with `op` and `rid`",
        ) from None
    decoder = _request_decoders.get(envelope.op)
    if decoder is None:
        raise UnreadableRequest(
            f"unknown operation {envelope.op[:40]!r}",
            rid=envelope.rid,
            hint=f"known are: {', '.join(sorted(REQUESTS))}",
        )
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise UnreadableRequest(
            f"the {envelope.op} request is not well formed: {error}",
            rid=envelope.rid,
            hint="the protocol's page lists the fields of each request and their types",
        ) from None


def decode_answer(body: bytes | memoryview) -> Reply | Error | Progress | Finished:
    """Read a message from the daemon; raises `InvalidRequest` on anything else."""
    try:
        return _answer_decoder.decode(body)
    except UNREADABLE as error:
        raise InvalidRequest(f"the daemon sent a message that cannot be read: {error}") from None


def convert(data: object, kind: type[Message]) -> Message:
    """A typed struct from the plain data of a reply; raises `InvalidRequest` where it differs."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the answer has another form than expected: {error}") from None


def plain(message: msgspec.Struct) -> dict[str, object]:
    """A struct as plain maps and lists, ready for `Reply.result` or JSON."""
    result: dict[str, object] = msgspec.to_builtins(message)
    return result


def error_info(error: OffloadError) -> ErrorInfo:
    """An exception as it travels: always one that can be sent.

    Sentences quote what they complain about, such as names of files, whose bytes need not be UTF-8.
    """
    return ErrorInfo(
        code=error.code.value,
        message=_sendable(error.message),
        hint=_sendable(error.hint),
        details=_sendable(error.details),
    )


def to_exception(info: ErrorInfo) -> OffloadError:
    """The exception that an error from the other side stands for."""
    return from_code(info.code, info.message, info.hint, info.details)


def _sendable(value: Any) -> Any:
    """Plain data with half characters written as `\\udcff`, and integers over 64 bits as texts."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case int() if not -(2**63) <= value < 2**64:
            return str(value)
        case Mapping():
            return {_sendable(key): _sendable(item) for key, item in value.items()}
        case list() | tuple():
            return [_sendable(item) for item in value]
        case _:
            return value


def check_frames(frames: Sequence[memoryview | bytes], limits: Limits) -> None:
    """Raise `TooLarge` where the frames beside a body are too many or too long."""
    if len(frames) > limits.max_frames:
        raise TooLarge(f"the message has {len(frames)} frames, the limit is {limits.max_frames}")
    sizes = [len(frame) for frame in frames]
    longest = max(sizes, default=0)
    if longest > limits.max_frame_bytes:
        raise TooLarge(f"a frame has {longest} bytes, the limit is {limits.max_frame_bytes}")
    if sum(sizes) > limits.max_message_bytes:
        raise TooLarge(
            f"the message has {sum(sizes)} bytes, the limit is {limits.max_message_bytes}"
        )


__all__ = [
    "UNREADABLE",
    "Answer",
    "UnreadableRequest",
    "check_frames",
    "convert",
    "decode_answer",
    "decode_request",
    "encode",
    "error_info",
    "plain",
    "to_exception",
]
