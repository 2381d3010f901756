"""From a source as people write it to a directory on this machine; nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

import offloadd.hosting
from offload_protocol.errors import InvalidRequest, ModelLoadFailed
from offloadd.store.index import find_source
from offloadd.store.index.hub_cache import hub_cache

_BUILTIN = "builtin:"


def source_directory(source: str, revision: str | None = None) -> Path:
    """The pipeline's directory for `builtin:NAME`, an absolute path, or a model in the hub cache.

    Raises `InvalidRequest` for a relative path, `ModelLoadFailed` where nothing is there.
    """
    if source.startswith(_BUILTIN):
        return _builtin(source.removeprefix(_BUILTIN))
    if source.startswith((".", "~")):
        raise InvalidRequest(
            f"the source {source[:200]!r} is not an absolute path",
            hint="the daemon has another working directory; give the path from the root",
        )
    return find_source(source, cache_directory=hub_cache(os.environ), revision=revision or "main")


def _builtin(name: str) -> Path:
    directory = Path(offloadd.hosting.__file__).parent / name
    if not name.isidentifier() or not (directory / "model_index.json").is_file():
        raise ModelLoadFailed(
            f"{_BUILTIN}{name[:100]} is not shipped with this daemon",
            hint="the built-in model is builtin:shapes",
        )
    return directory
