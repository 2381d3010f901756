"""The header of a GGUF file: what is sound is indexed, what is not is refused with the reason."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_protocol.errors import ModelLoadFailed
from offloadd.store.index.gguf import BlockType, read_gguf

TYPES = {2: BlockType("Q4_0", 32, 18), 8: BlockType("Q8_0", 32, 34)}
F32, Q4, Q8 = 0, 2, 8


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return (
        text(name.encode())
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


SETTINGS = [
    text(b"general.architecture") + struct.pack("<I", 8) + text(b"flux"),
    text(b"general.alignment") + struct.pack("<II", 4, 64),
    text(b"some.list") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"bc"),
    text(b"some.numbers") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0),
    text(b"some.flag") + struct.pack("<I?", 7, True),
]
ENTRIES = [
    entry("a.weight", [64, 3], Q4, 0),
    entry("a.bias", [3], F32, 128),
    entry("b.weight", [32, 2], Q8, 192),
]
DATA_BYTES = 192 + 2 * 34


def gguf(
    entries: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    count: int | None = None,
    settings: list[bytes] | None = None,
    data_bytes: int = DATA_BYTES,
) -> bytes:
    entries = ENTRIES if entries is None else entries
    settings = SETTINGS if settings is None else settings
    head = magic + struct.pack(
        "<IQQ", version, len(entries) if count is None else count, len(settings)
    )
    head += b"".join(settings) + b"".join(entries)
    head += bytes(-len(head) % 64)
    return head + bytes(data_bytes)


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def test_what_is_held_in_blocks_is_indexed_as_bytes(tmp_path: Path) -> None:
    data = gguf()
    index = read_gguf(written(tmp_path, data), TYPES)
    specs = {name: (one.spec.dtype, one.spec.shape) for name, one in index.tensors.items()}
    assert specs == {
        "a.weight": ("U8", (3, 36)),
        "a.bias": ("F32", (3,)),
        "b.weight": ("U8", (2, 34)),
    }
    assert index.metadata == {"a.weight": "Q4_0", "b.weight": "Q8_0"}
    start = len(data) - DATA_BYTES
    assert [one.start_bytes - start for one in index.tensors.values()] == [0, 128, 192]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (gguf(magic=b"GGML"), "begins with"),
        (gguf(version=1), "version is 1"),
        (gguf()[:-1], "cut short"),
        (gguf()[:40], "cut short"),
        (gguf()[:2], "cut short"),
        (b"", "cut short"),
        (gguf(count=1 << 60), "dimensions"),
        (gguf([entry("a", [64], 99, 0)]), "type 99"),
        (gguf([entry("a", [63], Q4, 0)]), "no whole blocks of 32"),
        (gguf([entry("a", [64], Q4, 1)]), "no multiple of 64"),
        (gguf([entry("a", [64], Q4, 0), entry("a", [64], Q4, 64)]), "twice"),
        (gguf([entry("a", [64, 2], Q4, 0), entry("b", [64], Q4, 64)]), "overlaps 'a'"),
        (gguf([entry("a", [1 << 40, 1 << 20], F32, 0)]), "needs a file of"),
        (gguf([entry("a", [2, 2, 2, 2, 2], F32, 0)]), "5 dimensions"),
        (gguf([entry("a", [0, 1 << 63], F32, 0)]), "no elements"),
        (gguf(settings=[text(b"key") + struct.pack("<I", 77)]), "type 77"),
        (gguf(settings=[text(b"general.alignment") + struct.pack("<II", 4, 3)]), "power of two"),
        (gguf(settings=[text(b"key") + struct.pack("<IIQ", 9, 6, 1 << 61)]), "bytes"),
    ],
)
def test_a_file_that_is_not_sound_is_refused_before_anything_is_allocated(
    tmp_path: Path, data: bytes, named: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=named) as refused:
        read_gguf(written(tmp_path, data), TYPES)
    assert "model.gguf" in refused.value.message
    assert refused.value.hint


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="is not there"):
        read_gguf(tmp_path / "none.gguf", TYPES)
    with pytest.raises(ModelLoadFailed, match="directory"):
        read_gguf(tmp_path, TYPES)


@given(st.data())
def test_whatever_a_file_holds_the_answer_is_an_index_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    spoilt = bytearray(gguf())
    head = len(spoilt) - DATA_BYTES
    for _ in range(data.draw(st.integers(1, 3))):
        spoilt[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    path = written(tmp_path_factory.getbasetemp(), bytes(spoilt))
    try:
        index = read_gguf(path, TYPES)
    except ModelLoadFailed:
        return
    assert all(one.stop_bytes <= len(spoilt) for one in index.tensors.values())
