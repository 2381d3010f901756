"""Packs: plain safetensors files that are whole or not there."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import safe_open

from offload_protocol.errors import StorageFailed
from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.index import read_checkpoint
from offloadd.store.layout import TensorSpec, lay_out
from offloadd.store.pack import DATA_ALIGNMENT_BYTES, PackEntry, write_pack
from offloadd.store.reader import DiskReader

FIRST = TensorSpec("a.weight", "F8_E4M3", (3, 5))
SECOND = TensorSpec("a.bias", "BF16", (7,))


def _entries() -> list[PackEntry]:
    return [
        PackEntry(FIRST, lambda: bytes(range(FIRST.size_bytes))),
        PackEntry(SECOND, lambda: bytes(range(100, 100 + SECOND.size_bytes))),
    ]


def test_a_pack_is_a_safetensors_file_whose_data_start_on_a_page(tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "new" / "p.safetensors", _entries())
    assert pack.path.stat().st_size == pack.size_bytes
    assert (int.from_bytes(pack.path.read_bytes()[:8], "little") + 8) % DATA_ALIGNMENT_BYTES == 0
    with safe_open(str(pack.path), framework="pt") as file:
        assert set(file.keys()) == {"a.weight", "a.bias"}
        assert file.get_tensor("a.weight").shape == FIRST.shape
    assert [path.name for path in pack.path.parent.iterdir()] == ["p.safetensors"]


def test_a_pack_serves_the_bytes_that_went_in(tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "p.safetensors", _entries())
    layout = lay_out([("a", [FIRST, SECOND])])
    reader = DiskReader(threads=1)
    source = CheckpointSource(read_checkpoint(pack.path), layout, reader)
    into = bytearray(layout.size_bytes)
    source.read(0, layout.size_bytes, memoryview(into)).result()
    source.close()
    reader.close()
    for entry in _entries():
        slot = layout.slots()[entry.spec.name]
        assert into[slot.offset_bytes : slot.stop_bytes] == entry.produce()


def test_the_same_bytes_have_the_same_checksum_and_others_another(tmp_path: Path) -> None:
    first = write_pack(tmp_path / "1", _entries())
    again = write_pack(tmp_path / "2", _entries())
    other = [PackEntry(FIRST, lambda: bytes(FIRST.size_bytes)), _entries()[1]]
    assert first.crc32 == again.crc32 != write_pack(tmp_path / "3", other).crc32


def test_an_entry_that_gives_too_few_bytes_leaves_the_older_pack_in_place(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    before = write_pack(path, _entries())
    with pytest.raises(ValueError, match=r"a\.weight"):
        write_pack(path, [PackEntry(FIRST, lambda: b"short")])
    assert path.stat().st_size == before.size_bytes
    assert list(tmp_path.iterdir()) == [path]


def test_case_14_a_directory_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produced: list[str] = []
    full = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    entry = PackEntry(FIRST, lambda: produced.append("called") or bytes(FIRST.size_bytes))  # type: ignore[func-returns-value]
    with pytest.raises(StorageFailed) as refused:
        write_pack(tmp_path / "p.safetensors", [entry])
    assert str(tmp_path) in refused.value.message
    assert refused.value.details["size_bytes"] > FIRST.size_bytes
    assert not produced
    assert not list(tmp_path.iterdir())


@contextmanager
def _file_size_limit(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_case_14_a_disk_that_fills_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    large = TensorSpec("w", "U8", (100_000,))
    with (
        _file_size_limit(50_000),
        pytest.raises(StorageFailed) as refused,
    ):
        write_pack(tmp_path / "p", [PackEntry(large, lambda: bytes(100_000))])
    assert refused.value.details["directory"] == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_case_14_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    # A file where the directory should be: permissions do not stop root, this does.
    (tmp_path / "cache").write_text("")
    with pytest.raises(StorageFailed) as refused:
        write_pack(tmp_path / "cache" / "p", _entries())
    assert str(tmp_path / "cache") in refused.value.message


def test_case_14_what_a_dead_writer_left_is_cleaned_and_a_living_ones_is_not(
    tmp_path: Path,
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"other.safetensors.{dead.pid}.unfinished"
    living = tmp_path / f"other.safetensors.{os.getppid()}.unfinished"
    left.write_bytes(b"half")
    living.write_bytes(b"half")
    write_pack(tmp_path / "p.safetensors", _entries())
    assert not left.exists()
    assert living.exists()
