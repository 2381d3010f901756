"""From a source as people write it to a directory: a path, or a model's name in the hub cache.

Nothing is downloaded. The cache's own layout (`models--ORG--NAME/refs/REVISION` names a commit,
`snapshots/COMMIT` holds links into `blobs`) is followed, and each way in which it can be broken
has a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from offload_protocol.errors import ModelLoadFailed
from offloadd.store.index.weight_file import looking_at, read_small_file, refuse

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", re.ASCII)
_REF_LIMIT_BYTES = 1024


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Where the cache is: the same places, in the same order, as huggingface_hub."""
    for name, below in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if value := environ.get(name):
            return Path(value).expanduser() / below
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def find_source(source: str, *, cache_directory: Path, revision: str = "main") -> Path:
    """The directory (or file) of a model that is on this machine.

    An existing path is taken as it is, except that a `models--ORG--NAME` folder of a hub cache
    stands for its snapshot of `revision`. Raises `ModelLoadFailed`, or `StorageFailed` where the
    disk fails.
    """
    path = Path(source).expanduser()
    with looking_at(path):
        return _find(source, path, cache_directory, revision)


def _find(source: str, path: Path, cache_directory: Path, revision: str) -> Path:
    if path.exists():
        return _snapshot(path, revision) if _is_cache_entry(path) else path
    if path.is_symlink():
        raise refuse(path, "is a link to nothing", "restore what the link points to")
    if not _NAME.fullmatch(source):
        raise refuse(path, "is not there", "check the path of the model", kind="missing")
    entry = cache_directory / f"models--{source.replace('/', '--')}"
    if not entry.is_dir():
        raise ModelLoadFailed(
            f"{source!r} is neither a path on this machine nor a model in the hub cache at "
            f"{cache_directory}",
            hint=f"download it first, for example with `hf download {source}`, or give a path",
            details={"source": source, "path": str(entry), "kind": "not_cached"},
        )
    return _snapshot(entry, revision)


def _is_cache_entry(path: Path) -> bool:
    return path.name.startswith("models--") and (path / "snapshots").is_dir()


def _snapshot(entry: Path, revision: str) -> Path:
    if not _REVISION.fullmatch(revision):
        raise refuse(entry, f"cannot have a revision {revision!r}", "name a branch or a commit")
    commit = revision if _COMMIT.fullmatch(revision) else _commit(entry, revision)
    snapshot = entry / "snapshots" / commit
    if not snapshot.is_dir():
        raise refuse(
            snapshot,
            f"is not there, although the cache says that {revision} is this commit",
            "download the model again",
            kind="missing_snapshot",
            expected=commit,
            found=_snapshots(entry),
        )
    return snapshot


def _commit(entry: Path, revision: str) -> str:
    ref = entry / "refs" / revision
    if not ref.is_file():
        there = _snapshots(entry)
        known = f"; it holds the snapshots {', '.join(there)}" if there else ""
        raise refuse(
            entry,
            f"has no refs/{revision}, so that nothing says which snapshot is meant{known}",
            "download the model again, or give the path of one of the snapshots as the source",
            kind="missing_ref",
            expected=f"refs/{revision}",
            found=there,
        )
    commit = read_small_file(ref, _REF_LIMIT_BYTES).decode("ascii", "replace").strip()
    if not _COMMIT.fullmatch(commit):
        raise refuse(
            ref,
            f"holds {commit!r}, not the id of a commit",
            "download the model again",
            kind="bad_ref",
            found=commit,
        )
    return commit


def _snapshots(entry: Path) -> list[str]:
    folder = entry / "snapshots"
    return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
