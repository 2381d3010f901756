"""When to ask again after `busy`; pure, with its randomness handed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload_protocol.errors import Busy

MIN_WAIT_S, MAX_WAIT_S = 0.05, 60.0
UNSAID_WAIT_S = 1.0
SPREAD = 0.25
"""Waits are lengthened by up to this share, so that clients do not return in step."""


def retry_time(
    error: Busy, now: float, deadline: float | None, random: Callable[[], float]
) -> float | None:
    """When to ask again, or None where the deadline would pass before.

    The daemon's `retry_after_s` is followed within bounds, whatever it says; `random` gives numbers
    from 0 to 1.
    """
    said: Any = error.details.get("retry_after_s")
    asked_s = float(said) if isinstance(said, (int, float)) else UNSAID_WAIT_S
    wait_s = min(max(MIN_WAIT_S, asked_s), MAX_WAIT_S)  # in this order NaN gives the least
    retry_at = now + wait_s * (1 + SPREAD * random())
    return retry_at if deadline is None or retry_at < deadline else None
