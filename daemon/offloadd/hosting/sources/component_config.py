"""A component's `config.json`, read as the settings that it is checked by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offloadd.store.index.strict_json import parse_object
from offloadd.store.index.weight_file import read_small_file, refuse

_LIMIT_BYTES = 10_000_000


def read_config(directory: Path) -> dict[str, Any]:
    """The settings; none where there is no file. Raises `ModelLoadFailed` for an unsound one."""
    path = directory / "config.json"
    if not path.exists():
        return {}
    try:
        return parse_object(read_small_file(path, _LIMIT_BYTES))
    except ValueError as error:
        raise refuse(path, f"is not a sound configuration: {error}", "download it again") from None
