"""Where the control plane gets its times and seeds from, so that tests can say them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time and seeds come from."""

    monotonic_s: Callable[[], float]
    wall_s: Callable[[], float]
    new_seed: Callable[[], int]
