"""The header parser takes what safetensors takes, and nothing that it does not."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from offloadd.store.index.header import BadHeader, Header, header_length, parse_header
from offloadd.store.layout import DTYPE_BITS

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}

shapes = st.lists(st.integers(0, 5), max_size=4)
tables = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(sorted(DTYPE_BITS)), shapes),
    max_size=6,
)


def parse(blob: bytes) -> Header:
    length = header_length(blob[:8], len(blob))
    return parse_header(blob[8 : 8 + length], len(blob))


def blob_of(table: dict[str, tuple[str, list[int]]]) -> bytes:
    tensors = {
        name: torch.zeros(shape, dtype=getattr(torch, _TORCH_NAMES[dtype]))
        for name, (dtype, shape) in table.items()
    }
    return bytes(save(tensors, {"format": "pt"}))


def file_of(header: object, data_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def one(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@settings(deadline=None)
@given(tables)
def test_every_file_that_safetensors_writes_is_read_as_it_reads_it(
    table: dict[str, tuple[str, list[int]]],
) -> None:
    blob = blob_of(table)
    header = parse(blob)
    theirs = {name: (info["dtype"], info["shape"]) for name, info in deserialize(blob)}
    ours = {one.spec.name: (one.spec.dtype, list(one.spec.shape)) for one in header.tensors}
    assert ours == theirs
    assert header.metadata == {"format": "pt"}
    assert header.data_start_bytes + header.data_bytes == len(blob)


@settings(deadline=None)
@given(tables, st.data())
def test_a_damaged_file_is_refused_or_is_one_that_safetensors_takes_too(
    table: dict[str, tuple[str, list[int]]], data: st.DataObject
) -> None:
    blob = bytearray(blob_of(table))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(blob) - 1, 0)))
        damage = data.draw(st.sampled_from(["flip", "digit", "cut", "insert"]))
        if damage == "flip" and blob:
            blob[at] = data.draw(st.integers(0, 255))
        elif damage == "digit" and blob:
            blob[at] = data.draw(st.sampled_from(list(b'0123456789,[]{}":')))
        elif damage == "cut":
            del blob[at : at + data.draw(st.integers(1, 40))]
        else:
            blob[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        parse(bytes(blob))
    except BadHeader:
        return
    try:
        deserialize(bytes(blob))
    except SafetensorError as error:
        pytest.fail(f"accepted what safetensors refuses: {error}")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_header_give_the_coded_error_only(noise: bytes) -> None:
    # Random bytes never hold eight of a small length and then an object of JSON by chance.
    with pytest.raises(BadHeader):
        parse(noise)


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100_000_001])
def test_a_header_that_claims_the_impossible_is_refused_without_allocating(length: int) -> None:
    blob = struct.pack("<Q", length) + b"{}"
    tracemalloc.start()
    with pytest.raises(BadHeader, match=f"claims {length} bytes"):
        parse(blob)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        (one(dtype="F4"), 4, "dtype is 'F4'"),
        (one(dtype="F8_E8M0"), 4, "dtype is 'F8_E8M0'"),
        (one(dtype=None), 4, "dtype is None"),
        (one(shape=[2]), 4, "takes 2 bytes but its data_offsets span 4"),
        (one(shape=[2**61]), 4, "takes"),
        (one(shape=[2**63, 2**63]), 4, "beyond what can be counted"),
        (one(shape=[0, 2**63], offsets=[0, 0]), 0, "beyond what can be counted"),
        (one(shape=[-4]), 4, "shape is not a list of whole numbers"),
        (one(shape=[4.0]), 4, "shape is not a list of whole numbers"),
        (one(shape=[True] * 4), 4, "shape is not a list of whole numbers"),
        (one(shape=[1] * 65), 4, "at most 64"),
        (one(offsets=[4, 0]), 4, "not a start and a stop"),
        (one(offsets=[0, 4, 8]), 4, "at most 2"),
        (one(offsets=[1, 5]), 5, "leaves a hole"),
        (one(), 3, "need a file of"),
        (one(), 5, "need a file of"),
        ({"w": 3}, 0, "its entry is a int"),
        ({"__metadata__": {"a": 1}}, 0, "not a map of strings"),
        (b"[]", 0, "does not begin with {"),
        (b" {}", 0, "does not begin with {"),
        (b"", 0, "does not begin with {"),
        (b'{"a":{},"a":{}}', 0, "'a' appears twice"),
        (b'{"w":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}}', 4, "appears twice"),
        (b'{"w":NaN}', 0, "NaN"),
        (b'{"\xff":1}', 0, "not UTF-8"),
        (b'{"\\ud800":1}', 0, "surrogate"),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", 0, "nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, "cannot be read"),
    ],
)
def test_a_bad_header_is_refused_with_a_sentence(
    header: object, data_bytes: int, message: str
) -> None:
    with pytest.raises(BadHeader) as caught:
        parse(file_of(header, data_bytes))
    assert message in caught.value.problem


def test_overlapping_tensors_are_refused_by_name() -> None:
    header = one() | {"v": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}
    with pytest.raises(BadHeader, match="overlaps the one before it") as caught:
        parse(file_of(header, 6))
    assert caught.value.tensor == "v"
    assert (caught.value.expected, caught.value.found) == (4, 2)
