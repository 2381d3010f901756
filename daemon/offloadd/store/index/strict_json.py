"""JSON that means one thing only: duplicate keys, NaN and runaway nesting are refused.

A header with the same key twice is read differently by different programs, so it is never
guessed at. Pure; raises `ValueError` with a sentence for every kind of bad text.
"""

from __future__ import annotations

import json
from typing import Any


def parse_object(text: bytes) -> dict[str, Any]:
    """The one JSON object that `text` (UTF-8) holds; trailing whitespace is allowed.

    Raises `ValueError` for bad UTF-8, bad JSON, a duplicate key, NaN or Infinity, nesting that is
    too deep, or a value that is not an object.
    """
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
    _refuse_half_characters(text, value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} appears twice")
            seen.add(key)
    return found


def _refuse_half_characters(text: bytes, value: dict[str, Any]) -> None:
    # An escaped lone surrogate is a Python string that can be neither printed nor sent.
    if b"\\ud" not in text.lower():
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair") from None


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"it holds {word}, which JSON does not have")
