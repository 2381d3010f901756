"""What it costs to make another model the present one: bytes to move by bandwidth.

Loading goes by the bandwidth that was measured. Weights of loaded models that do not fit a device
of its own memory together have to come back to it, over a link whose speed only its worker knows;
there the order of magnitude is assumed. On a CPU, weights are used where they are.
"""

from __future__ import annotations

from collections.abc import Callable

from offloadd.channel.messages import DeviceReport
from offloadd.control.models.models import ModelTable

FIRST_GUESS_BYTES_PER_S = 1e9
LINK_BYTES_PER_S = 1e10
WEIGHT_OF_LATEST = 0.3
LEAST_BYTES = 1 << 20
"""A smaller model says nothing about bandwidth: its loading is all overhead."""


class Costs:
    """The seconds that switching to each model takes."""

    def __init__(self, models: ModelTable, device: Callable[[], DeviceReport | None]) -> None:
        self._models = models
        self._device = device
        self._bytes_per_s = FIRST_GUESS_BYTES_PER_S

    def note_load(self, loaded_bytes: int, loading_s: float) -> None:
        """A model of this size was loaded in this time."""
        if loaded_bytes >= LEAST_BYTES and loading_s > 0:
            latest = loaded_bytes / loading_s
            self._bytes_per_s += WEIGHT_OF_LATEST * (latest - self._bytes_per_s)

    def switch_s(self, name: str) -> float:
        """How long a job on this model would wait for its weights; 0 where they are in place."""
        model = self._models.get(name)
        if model is None or model.described is None:
            return 0.0
        moved_bytes = sum(component.bytes for component in model.described.components)
        if model.loaded is None:
            return moved_bytes / self._bytes_per_s
        device = self._device()
        if device is None or device.device == "cpu":
            return 0.0
        loaded = [one.loaded.components for one in self._models if one.loaded is not None]
        all_bytes = sum(component.bytes for components in loaded for component in components)
        if all_bytes <= device.total_bytes:
            return 0.0
        return min(moved_bytes, device.total_bytes) / LINK_BYTES_PER_S
