"""What a start of the daemon clears out of the cache of packs, and what it leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offloadd.store.index.weight_file import read_weight_file
from offloadd.store.layout import TensorSpec
from offloadd.store.pack import PackEntry, write_pack
from offloadd.store.pack_cache import (
    SourceFile,
    clear_out,
    pack_metadata,
    size_limit_bytes,
)

PLENTY = 1 << 40


def a_pack(directory: Path, name: str, source: Path | None = None) -> Path:
    """A pack made from a file that is written for it, or from `source`."""
    if source is None:
        source = write_pack(directory / f"source-of-{name}", [an_entry()]).path
    files = [SourceFile.of(read_weight_file(source).file)]
    path = directory / "packs" / f"{name}.safetensors"
    return write_pack(path, [an_entry()], pack_metadata(files)).path


def an_entry() -> PackEntry:
    return PackEntry(TensorSpec("w", "U8", (1000,)), lambda: bytes(1000))


def left(directory: Path) -> list[str]:
    return sorted(path.stem for path in (directory / "packs").iterdir())


def test_a_pack_whose_files_are_as_they_were_stays(tmp_path: Path) -> None:
    a_pack(tmp_path, "good")
    assert clear_out(tmp_path / "packs", PLENTY).packs == 0
    assert left(tmp_path) == ["good"]


def test_packs_of_files_that_are_gone_or_changed_go(tmp_path: Path) -> None:
    for name in ("gone", "changed", "good"):
        a_pack(tmp_path, name)
    (tmp_path / "source-of-gone").unlink()
    os.truncate(tmp_path / "source-of-changed", 10)
    cleared = clear_out(tmp_path / "packs", PLENTY)
    assert cleared.packs == 2
    assert cleared.size_bytes > 2000
    assert left(tmp_path) == ["good"]


def test_what_is_no_pack_of_this_version_goes(tmp_path: Path) -> None:
    a_pack(tmp_path, "good")
    write_pack(tmp_path / "packs/old.safetensors", [an_entry()])
    (tmp_path / "packs/damaged.safetensors").write_bytes(b"no header")
    clear_out(tmp_path / "packs", PLENTY)
    assert left(tmp_path) == ["good"]


def test_a_pack_that_somebody_has_open_stays(tmp_path: Path) -> None:
    pack = a_pack(tmp_path, "open")
    (tmp_path / "source-of-open").unlink()
    with pack.open("rb"):
        assert clear_out(tmp_path / "packs", PLENTY).packs == 0
    assert clear_out(tmp_path / "packs", PLENTY).packs == 1


def test_beyond_the_limit_those_read_longest_ago_go(tmp_path: Path) -> None:
    packs = [a_pack(tmp_path, name) for name in ("a", "b", "c")]
    for pack, read_s in zip(packs, (300, 100, 200), strict=True):
        os.utime(pack, (read_s, pack.stat().st_mtime))
    one = packs[0].stat().st_size
    assert clear_out(tmp_path / "packs", 2 * one).packs == 1
    assert left(tmp_path) == ["a", "c"]


def test_without_a_cache_nothing_happens(tmp_path: Path) -> None:
    assert clear_out(tmp_path / "nowhere", 0).packs == 0


@pytest.mark.parametrize(("setting", "share"), [("50%", 0.5), ("100%", 1.0)])
def test_a_share_is_of_the_file_system(tmp_path: Path, setting: str, share: float) -> None:
    status = os.statvfs(tmp_path)
    whole = status.f_blocks * status.f_frsize
    assert size_limit_bytes(tmp_path / "a/b", setting) == int(whole * share)
    assert size_limit_bytes(tmp_path / "a/b", "1GiB") == 1 << 30
