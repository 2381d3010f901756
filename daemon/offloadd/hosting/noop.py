"""A model without weights that draws nothing: what is left of a job is what offloadd itself costs.

Hosted by the source `builtin:noop`; `bench/wire.py` measures the way of a job with it. Beside that
it passes through the same turn as a pipeline: its arguments are checked and converted, its borders
look for a cancel, its output travels as frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from offload_protocol.errors import InvalidRequest
from offload_protocol.records import ComponentInfo
from offloadd.channel.messages import ModelDescribed, ParameterInfo
from offloadd.channel.specs import ModelSpec
from offloadd.hosting.running.arguments import Call
from offloadd.hosting.running.job_view import OnStep
from offloadd.hosting.sources.signatures import Parameter, call_parameters

SOURCE = "builtin:noop"
MAX_BYTES = 512 << 20
"""Of one output; a frame may not be longer."""


class NoopPipeline:
    """Gives as many zeros as it is asked for."""

    def __call__(self, prompt: str = "", size_bytes: int = 0) -> dict[str, Any]:
        """`zeros` is an array of `size_bytes` bytes, and left out for 0."""
        if not 0 <= size_bytes <= MAX_BYTES:
            raise InvalidRequest(f"size_bytes is {size_bytes}, not between 0 and {MAX_BYTES}")
        return {"zeros": np.zeros(size_bytes, np.uint8)} if size_bytes else {}


class NoopModel:
    """Its own description, and the hosted model as well: there is nothing to load."""

    offload = "none"
    resident_bytes = 0
    moved_bytes = 0
    dtype = torch.float32

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.parameters: Mapping[str, Parameter] = call_parameters(NoopPipeline)
        self._pipeline = NoopPipeline()

    is_better_shared = False
    sweep_room = None

    @property
    def description(self) -> NoopModel:
        """What is known of it before it is loaded."""
        return self

    def message(self) -> ModelDescribed:
        """The answer to `Register`."""
        return ModelDescribed(
            name=self.spec.name,
            pipeline=NoopPipeline.__name__,
            dtype="float32",
            offload=self.offload,
            components=[],
            parameters=[
                ParameterInfo(
                    name=one.name,
                    kinds=list(one.kinds),
                    required=one.required,
                    items=list(one.items),
                )
                for one in self.parameters.values()
            ],
        )

    def run(
        self,
        call: Call,
        on_step: OnStep,
        at_border: Callable[[], None],
        at_root: Any = None,
        on_latents: Any = None,
        adapters: Any = (),
        owner: str | None = None,
    ) -> dict[str, Any]:
        """The output as plain values; raises `InvalidRequest`, or what `at_border` raises."""
        at_border()
        return self._pipeline(**call.arguments)

    def components(self) -> list[ComponentInfo]:
        """None."""
        return []

    def unload(self) -> list[str]:
        """Nothing is held that could stay behind."""
        return []
