"""What the process that plans before loading is told, and what it answers: one JSON object each."""

from __future__ import annotations

import msgspec

from offload_protocol.records import ErrorInfo, Forecast
from offloadd.channel.specs import ModelSpec


class ForecastOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is to be planned for a device, and what was measured there."""

    spec: ModelSpec
    on_cpu: bool
    device_bytes: int
    free_bytes: int
    host_budget_bytes: int | None = None
    link_bytes_per_s: float = 0.0
    """How fast weights come to the device; 0: nobody has measured it."""
    compute_s: dict[str, float] = {}
    """Seconds that a step of a component computes, where one of the same source has run."""


class ForecastAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of both."""

    forecast: Forecast | None = None
    error: ErrorInfo | None = None
