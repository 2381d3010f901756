"""From a pipeline's output object to plain values that can travel: images, arrays, lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from offload_protocol.errors import InternalError


def plain_outputs(output: Any) -> dict[str, Any]:
    """The fields of an output that are set, by name; tensors become arrays on the host.

    bfloat16 becomes float32, which holds each of its values exactly. Raises `InternalError` for a
    pipeline whose output has no names.
    """
    if not isinstance(output, Mapping):
        raise InternalError(f"the pipeline gave a {type(output).__name__}, not a named output")
    return {name: _plain(value) for name, value in output.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        host = value.detach().to("cpu")
        return (host.float() if host.dtype == torch.bfloat16 else host).contiguous().numpy()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_plain(item) for item in value.tolist()]
    if value is None or isinstance(value, (bool, int, float, str, np.ndarray, np.generic)):
        return value
    if isinstance(value, Image.Image):
        return value
    raise InternalError(f"the pipeline gave a {type(value).__name__}, which cannot be sent")
