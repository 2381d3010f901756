"""From a request's plain arguments to the keyword arguments of a pipeline's call, with its noise.

Picture k of a request is drawn from noise of its own, seeded `seed + k`, on the CPU; the picture
that seed gives alone starts from the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload_protocol.errors import InvalidRequest
from offloadd.hosting.sources.signatures import Parameter

_SEEDS = 1 << 64
_PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
_BATCHED = ("prompt", "prompt_embeds")
MAX_PICTURES = 256


@dataclass(frozen=True, slots=True)
class Call:
    """What a pipeline is called with; `seeds` has one entry per picture."""

    arguments: dict[str, Any]
    seeds: list[int]

    def with_noise(self, takes_generator: bool) -> dict[str, Any]:
        """The arguments with fresh generators; a single picture has one that is not in a list."""
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in self.seeds]
        if not takes_generator:
            return dict(self.arguments)
        noise = generators[0] if len(generators) == 1 else generators
        return {**self.arguments, "generator": noise}


def prepare_call(
    arguments: Mapping[str, Any],
    parameters: Mapping[str, Parameter],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Call:
    """Check the names and convert the values.

    Arrays become tensors on `device` where the pipeline asks for tensors, floating point ones of
    `dtype`. Raises `InvalidRequest` for a name that the pipeline does not take, one that it needs
    and did not get, or too many pictures.
    """
    unknown = [name for name in arguments if name not in parameters]
    if unknown:
        raise InvalidRequest(
            f"the pipeline takes no argument {unknown[0][:100]!r}",
            hint=f"it takes: {', '.join(parameters)}",
            details={"arguments": unknown},
        )
    missing = [
        one.name for one in parameters.values() if one.required and one.name not in arguments
    ]
    if missing:
        raise InvalidRequest(f"the pipeline needs the argument {missing[0]!r}")
    count = _picture_count(arguments)
    converted = {
        name: _convert(value, parameters[name], device, dtype) for name, value in arguments.items()
    }
    return Call(converted, [(seed + index) % _SEEDS for index in range(count)])


def _picture_count(arguments: Mapping[str, Any]) -> int:
    count = _batch_size(arguments)
    for name in _PER_PROMPT:
        per_prompt = arguments.get(name)
        if isinstance(per_prompt, int):
            count *= per_prompt
    if not 1 <= count <= MAX_PICTURES:
        raise InvalidRequest(
            f"the request asks for {count} pictures", hint=f"ask for 1 to {MAX_PICTURES}"
        )
    return count


def _batch_size(arguments: Mapping[str, Any]) -> int:
    for name in _BATCHED:
        value = arguments.get(name)
        if isinstance(value, list):
            return len(value)
        if isinstance(value, np.ndarray) and value.ndim:
            return int(value.shape[0])
    size = arguments.get("batch_size")
    return size if isinstance(size, int) else 1


def _convert(value: Any, parameter: Parameter, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, np.ndarray):
        if parameter.wants_tensor or "array" not in parameter.kinds:
            return _tensor(value, device, dtype)
        # The frame behind it is read-only, and some processors scale their input in place.
        return value.copy()
    if isinstance(value, list):
        items = [_convert(item, parameter, device, dtype) for item in value]
        return tuple(items) if parameter.wants_tuple else items
    if isinstance(value, dict):
        return {key: _convert(item, parameter, device, dtype) for key, item in value.items()}
    return value


def _tensor(array: np.ndarray[Any, Any], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
