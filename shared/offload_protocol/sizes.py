"""The one place that reads and writes sizes (`8GiB`, `80%`) and durations (`5m`)."""

from __future__ import annotations

import math
import re

from offload_protocol.errors import InvalidRequest

_UNITS_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_UNITS_S = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_BYTES = 2**63 - 1  # what a message can hold
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z%]*)\s*", re.ASCII)


def parse_size_bytes(text: str | int, whole_bytes: int | None = None) -> int:
    """Bytes from `8GiB`, `500MB`, `1024`, or `80%` of `whole_bytes`.

    Raises `InvalidRequest` for anything else, or a percentage where there is no whole.
    """
    if isinstance(text, int):
        return _in_range(text)
    match = _NUMBER.fullmatch(text)
    unit = match[2].lower() if match else None
    if match and unit == "%" and whole_bytes is not None and float(match[1]) <= 100:
        return int(whole_bytes * float(match[1]) / 100)
    if match is None or unit not in _UNITS_BYTES:
        raise InvalidRequest(f"{text!r} is not a size", hint="write it as 8GiB, 500MB or 80%")
    size_bytes = float(match[1]) * _UNITS_BYTES[unit]
    if size_bytes > _MOST_BYTES:
        raise InvalidRequest(
            f"{_shortened(text)!r} is more than {format_size(_MOST_BYTES)}",
            hint="write it as 8GiB, 500MB or 80%",
        )
    return int(size_bytes)


def format_size(size_bytes: int | float) -> str:
    """A size for people: `1.4 GiB`."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def parse_duration_s(text: str | int | float) -> float:
    """Seconds from `5m`, `30s`, `250ms`, `1.5h` or a number of seconds.

    Raises `InvalidRequest` for anything else.
    """
    if isinstance(text, (int, float)):
        if not 0 <= text < math.inf:
            raise InvalidRequest(f"{text} is not a duration", hint="give 0 seconds or more")
        return float(text)
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS_S:
        raise InvalidRequest(f"{text!r} is not a duration", hint="write it as 30s, 5m or 1.5h")
    duration_s = float(match[1]) * _UNITS_S[match[2].lower()]
    if math.isinf(duration_s):
        raise InvalidRequest(f"{_shortened(text)!r} is no finite duration", hint="write less")
    return duration_s


def format_duration(duration_s: float) -> str:
    """A duration for people: `80 ms`, `4.2 s`, `3m 20s`, `2h 05m`."""
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes}m {seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m"


def _in_range(value: int) -> int:
    if value < 0:
        raise InvalidRequest(f"{value} is negative", hint="give a number of 0 or more")
    if value > _MOST_BYTES:
        raise InvalidRequest(
            f"{_shortened(str(value))} bytes are more than {format_size(_MOST_BYTES)}",
            hint="write it as 8GiB, 500MB or 80%",
        )
    return value


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
