"""A model's name finds its snapshot in the hub cache; each way it breaks has a sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from offload_protocol.errors import ModelLoadFailed
from offloadd.store.index import find_source, inspect_pipeline, read_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache_with(tmp_path: Path, *, ref: str | None = COMMIT, snapshot: bool = True) -> Path:
    entry = tmp_path / "models--org--tiny"
    (entry / "refs").mkdir(parents=True)
    (entry / "snapshots").mkdir()
    if ref is not None:
        (entry / "refs" / "main").write_text(ref)
    if snapshot:
        (entry / "snapshots" / COMMIT).mkdir()
    return entry


def refusal(source: str, cache: Path, revision: str = "main") -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as caught:
        find_source(source, cache_directory=cache, revision=revision)
    assert caught.value.hint
    return caught.value


def test_a_name_a_cache_entry_and_a_path_all_lead_to_the_model(tmp_path: Path) -> None:
    entry = cache_with(tmp_path)
    snapshot = entry / "snapshots" / COMMIT
    for source in ("org/tiny", str(entry), str(snapshot)):
        assert find_source(source, cache_directory=tmp_path) == snapshot
    assert find_source("org/tiny", cache_directory=tmp_path, revision=COMMIT) == snapshot


def test_a_missing_refs_main_names_the_snapshots_that_could_be_meant(tmp_path: Path) -> None:
    cache_with(tmp_path, ref=None)
    error = refusal("org/tiny", tmp_path)
    assert "has no refs/main" in error.message
    assert COMMIT in error.message
    assert error.details["found"] == [COMMIT]


def test_a_ref_to_a_snapshot_that_was_cleaned_away_says_so(tmp_path: Path) -> None:
    cache_with(tmp_path, snapshot=False)
    assert (
        "although the cache says that main is this commit" in refusal("org/tiny", tmp_path).message
    )


def test_a_ref_that_holds_no_commit_is_not_followed(tmp_path: Path) -> None:
    cache_with(tmp_path, ref="../../../../etc")
    assert "not the id of a commit" in refusal("org/tiny", tmp_path).message


def test_a_revision_cannot_leave_the_cache(tmp_path: Path) -> None:
    cache_with(tmp_path)
    assert "cannot have a revision" in refusal("org/tiny", tmp_path, "../../x").message


def test_what_is_nowhere_says_where_was_looked(tmp_path: Path) -> None:
    error = refusal("org/other", tmp_path)
    assert str(tmp_path) in error.message
    assert "hf download org/other" in error.hint
    assert "is not there" in refusal("/no/such/place", tmp_path).message


def test_a_name_too_long_for_the_file_system_is_the_sources_fault(tmp_path: Path) -> None:
    assert "too long for the file system" in refusal("/" + "x" * 300, tmp_path).message


def test_a_path_through_a_file_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not there" in refusal(f"{tmp_path}/file/model", tmp_path).message


def test_a_directory_that_may_not_be_searched_is_told_apart_from_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As root no permission is missing, so the system's answer is given here.
    monkeypatch.setattr(os, "stat", no_permission)
    assert "may not be read by this process" in refusal("/closed/model", tmp_path).message
    for look in (inspect_pipeline, read_checkpoint):
        with pytest.raises(ModelLoadFailed, match="/closed/model may not be read"):
            look(Path("/closed/model"))


def no_permission(path: object, **options: object) -> os.stat_result:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))
