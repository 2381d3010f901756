"""Results are kept within their bytes; what gives way says so in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_protocol import codec
from offload_protocol.errors import InvalidRequest, StorageFailed
from offload_protocol.messages import Finished
from offload_protocol.records import Outcome
from offloadd.control.jobs.results import SLIGHT_BYTES, Result, Results, encoded, recovered
from offloadd.control.journal.frames import FrameFile

ROOM_BYTES = 100_000


def result(job: str, size_bytes: int) -> Result:
    outcome = Outcome(outputs={}, seeds=[])
    return encoded(Finished(job=job, state="done", outcome=outcome), [bytes(size_bytes)])


def told(kept: Result | None) -> Finished:
    assert kept is not None
    finished = codec.decode_answer(kept.body)
    assert isinstance(finished, Finished)
    return finished


def test_a_kept_result_is_given_until_it_is_dropped() -> None:
    results = Results(ROOM_BYTES)
    kept = result("a", 10)
    results.keep("1/a", kept)
    assert results.get("1/a") is kept
    results.drop("1/a")
    results.drop("1/a")
    assert results.get("1/a") is None
    assert results.kept_bytes == 0


def test_the_oldest_gives_way_with_an_error_in_its_place() -> None:
    results = Results(ROOM_BYTES)
    for name in "abc":
        results.keep(name, result(name, 40_000))
    lost = told(results.get("a"))
    assert lost.job == "a"
    assert lost.error is not None
    assert lost.error.code == "storage_failed"
    assert "results.max_bytes" in lost.error.hint
    assert told(results.get("b")).state == "done"
    assert results.evicted_total == 1
    assert results.kept_bytes <= ROOM_BYTES


def test_the_newest_is_kept_even_if_it_is_larger_than_the_room() -> None:
    results = Results(ROOM_BYTES)
    results.keep("a", result("a", 10_000))
    results.keep("b", result("b", 500_000))
    assert told(results.get("b")).state == "done"
    assert told(results.get("a")).state == "failed"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60_000)), max_size=40))
def test_bytes_are_counted_and_bounded(puts: list[tuple[int, int]]) -> None:
    results = Results(ROOM_BYTES)
    for job, size in puts:
        results.keep(str(job), result(str(job), size))
    kept = [one for job in range(10) if (one := results.get(str(job))) is not None]
    assert results.kept_bytes == sum(one.size_bytes for one in kept)
    assert results.kept_bytes <= ROOM_BYTES + 10 * SLIGHT_BYTES


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_large_result_is_told_by_its_lengths_and_read_piece_by_piece(
    tmp_path: Path, on_disk: bool
) -> None:
    frames = [os.urandom(250), b"", os.urandom(90)]
    outcome = Outcome(outputs={}, seeds=[1])
    kept = encoded(Finished(job="a", state="done", outcome=outcome), frames, piece_bytes=100)
    results = Results(ROOM_BYTES)
    results.keep("a", kept)
    if on_disk:
        file = FrameFile(tmp_path / "frames", kept.lengths)
        file.write(frames, durable=False)
        results.is_on_disk("a", file)
    assert told(kept).sizes == [250, 0, 90]
    assert results.message("a") == (kept.body,)
    for number, frame in enumerate(frames):
        pieces = [results.piece("a", number, start, 100) for start in range(0, len(frame), 100)]
        assert b"".join(pieces) == frame
    assert bytes(results.piece("a", 0, 250, 100)) == b""
    for number, offset in ((3, 0), (-1, 0), (0, 251), (0, -1)):
        with pytest.raises(InvalidRequest, match="has no byte"):
            results.piece("a", number, offset, 100)
    again = recovered("a", kept.body, (), FrameFile(tmp_path / "frames", kept.lengths))
    assert again.is_in_pieces


def test_a_small_result_comes_whole() -> None:
    results = Results(ROOM_BYTES)
    kept = result("a", 100)
    results.keep("a", kept)
    assert told(kept).sizes == []
    assert results.message("a") == (kept.body, bytes(100))
    assert results.message("b") is None


def test_a_large_result_whose_file_was_cut_is_given_up_with_the_reason(tmp_path: Path) -> None:
    file = FrameFile(tmp_path / "frames", (250,))
    file.write([bytes(250)], durable=False)
    outcome = Outcome(outputs={}, seeds=[1])
    results = Results(ROOM_BYTES)
    results.keep("a", encoded(Finished(job="a", state="done", outcome=outcome), [bytes(250)], 100))
    results.is_on_disk("a", file)
    os.truncate(file.path, 150)
    assert len(results.piece("a", 0, 0, 100)) == 100
    with pytest.raises(StorageFailed, match="ends before byte 200"):
        results.piece("a", 0, 100, 100)
    assert told(results.get("a")).state == "failed"
