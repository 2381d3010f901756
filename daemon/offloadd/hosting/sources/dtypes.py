"""Which dtype a model is computed in, and how many bytes its weights then take. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import DTYPE_BITS

_STORED = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"})
_NAMED = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_dtype(wanted: str, checkpoints: Iterable[CheckpointIndex], on_cpu: bool) -> torch.dtype:
    """The dtype that `wanted` names; `auto` keeps the one in which most bytes are stored.

    float16 becomes float32 on a CPU, where most of its operations are missing or slow; what is
    stored in 8 bits is computed in bfloat16.
    """
    if wanted != "auto":
        return _NAMED[wanted]
    stored: Counter[str] = Counter()
    for checkpoint in checkpoints:
        for place in checkpoint.tensors.values():
            if place.spec.dtype in _FLOATS and not is_of_quantised(place.spec.name):
                stored[place.spec.dtype] += place.spec.size_bytes
    if not stored or stored.most_common(1)[0][0] == "F64":
        return torch.float32
    dtype = _STORED.get(stored.most_common(1)[0][0], torch.bfloat16)
    return torch.float32 if on_cpu and dtype == torch.float16 else dtype


def is_of_quantised(name: str) -> bool:
    """Whether a tensor is part of a quantised weight, as torchao's safetensors files name these."""
    return name.rpartition(".")[2].startswith("_weight_")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def loaded_bytes(checkpoint: CheckpointIndex | None, dtype: torch.dtype) -> int:
    """Bytes of a checkpoint's tensors once its floating point ones have the dtype."""
    if checkpoint is None:
        return 0
    bits = sum(
        place.spec.size_bytes
        * 8
        * (dtype.itemsize * 8 if place.spec.dtype in _FLOATS else DTYPE_BITS[place.spec.dtype])
        // DTYPE_BITS[place.spec.dtype]
        for place in checkpoint.tensors.values()
    )
    return bits // 8
