"""How long a job is likely to have the device, from what jobs on its model took before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST_GUESS_S = 5.0
"""How long a job takes, before one has ended."""

WEIGHT_OF_LATEST = 0.2
MAX_MODELS = 1024


class Estimates:
    """Moving averages of seconds a step, and of seconds a job, for each model."""

    def __init__(self) -> None:
        self.typical_s = FIRST_GUESS_S
        self._step_s: dict[str, float] = {}

    def note(self, model: str, arguments_steps: int, took_s: float) -> None:
        """A job took this long; `arguments_steps` is what `steps_of` said of it."""
        self.typical_s += WEIGHT_OF_LATEST * (took_s - self.typical_s)
        step_s = took_s / arguments_steps
        if model not in self._step_s and len(self._step_s) >= MAX_MODELS:
            del self._step_s[next(iter(self._step_s))]
        before_s = self._step_s.get(model, step_s)
        self._step_s[model] = before_s + WEIGHT_OF_LATEST * (step_s - before_s)

    def expected_s(self, model: str, arguments_steps: int) -> float:
        """How long a job is likely to take."""
        step_s = self._step_s.get(model)
        return self.typical_s if step_s is None else step_s * arguments_steps


def steps_of(arguments: Mapping[str, Any]) -> int:
    """The steps that a request names; 1 where it leaves them to the pipeline."""
    steps = arguments.get("num_inference_steps")
    return steps if isinstance(steps, int) and steps > 0 else 1
