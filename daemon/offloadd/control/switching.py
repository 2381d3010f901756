"""What it costs to make another model the present one: bytes to move by measured bandwidth."""

from __future__ import annotations

from offloadd.control.models import ModelTable

FIRST_GUESS_BYTES_PER_S = 1e9
WEIGHT_OF_LATEST = 0.3
LEAST_BYTES = 1 << 20
"""A smaller model says nothing about bandwidth: its loading is all overhead."""


class Costs:
    """The seconds that switching to each model takes."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._bytes_per_s = FIRST_GUESS_BYTES_PER_S

    def note_load(self, loaded_bytes: int, loading_s: float) -> None:
        """A model of this size was loaded in this time."""
        if loaded_bytes >= LEAST_BYTES and loading_s > 0:
            latest = loaded_bytes / loading_s
            self._bytes_per_s += WEIGHT_OF_LATEST * (latest - self._bytes_per_s)

    def switch_s(self, name: str) -> float:
        """How long a job on this model would wait for its weights; 0 where they are in memory."""
        model = self._models.get(name)
        if model is None or model.loaded is not None or model.described is None:
            return 0.0
        moved_bytes = sum(component.bytes for component in model.described.components)
        return moved_bytes / self._bytes_per_s
