"""docs/protocol.md says what the code says."""

from __future__ import annotations

import re

import msgspec
import pytest

import protocol_example
from offload_protocol.codec import decode_answer, decode_request
from offload_protocol.errors import ErrorCode
from offload_protocol.limits import DEFAULT_LIMITS, Limits
from offload_protocol.messages import PROTOCOL_VERSION, REQUESTS, Finished, Progress, Request
from offload_protocol.records import (
    ComponentInfo,
    ErrorInfo,
    JobInfo,
    ModelInfo,
    Outcome,
    Timings,
    Welcome,
)
from offload_protocol.values import ARRAY_DTYPES, IMAGE_MODES, unpack

DOCUMENT = protocol_example.DOCUMENT.read_text(encoding="utf-8")
PROSE = DOCUMENT.partition(protocol_example.BEGIN)[0]
NAMED = set(re.findall(r"`\"?([^`\"\n]+)\"?`", PROSE))


def test_the_worked_example_is_what_the_codec_makes() -> None:
    assert protocol_example.updated(DOCUMENT) == DOCUMENT, "run python tools/protocol_example.py"


def test_the_bytes_in_the_document_are_read_as_the_messages_they_show() -> None:
    blocks = re.findall(r"```text\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(blocks) == len(protocol_example.exchanges())
    for block, (_, _, message, frames) in zip(blocks, protocol_example.exchanges(), strict=True):
        parts = [
            bytes.fromhex("".join(re.findall(r"^  ((?:[0-9a-f]{2} ?)+)(?:\s|$)", part, re.M)))
            for part in re.split(r"^frame \d+: .*\n", block, flags=re.M)[1:]
        ]
        is_request = isinstance(message, Request)
        body = decode_request(parts[0], DEFAULT_LIMITS) if is_request else decode_answer(parts[0])
        assert body == message
        assert tuple(parts[1:]) == frames


def test_the_picture_of_the_example_is_as_described() -> None:
    end = next(m for _, _, m, _ in protocol_example.exchanges() if isinstance(m, Finished))
    assert end.outcome is not None
    image = unpack(end.outcome.outputs, [protocol_example.PIXELS])["images"][0]
    red, white = (255, 0, 0), (255, 255, 255)
    pixels = [image.getpixel((x, y)) for y in (0, 1) for x in (0, 1)]
    assert pixels == [red, red, white, white]


@pytest.mark.parametrize(
    "kind",
    [
        *REQUESTS.values(),
        *(Welcome, JobInfo, ModelInfo, ComponentInfo, Outcome, Timings),
        *(Progress, Finished, ErrorInfo, Limits),
    ],
)
def test_every_field_is_in_the_document(kind: type[msgspec.Struct]) -> None:
    assert set(kind.__struct_fields__) <= NAMED


def test_every_operation_error_code_dtype_and_mode_is_in_the_document() -> None:
    assert set(REQUESTS) <= NAMED
    assert {code.value for code in ErrorCode} <= NAMED
    assert set(ARRAY_DTYPES) | set(IMAGE_MODES) <= NAMED


def test_the_limits_and_the_version_in_the_document_are_those_of_the_code() -> None:
    table = dict(re.findall(r"^\| `(max_\w+)` \| (\d+) \|", DOCUMENT, re.M))
    assert {name: int(value) for name, value in table.items()} == msgspec.to_builtins(
        DEFAULT_LIMITS
    )
    assert f"version {PROTOCOL_VERSION}" in DOCUMENT.splitlines()[0]
