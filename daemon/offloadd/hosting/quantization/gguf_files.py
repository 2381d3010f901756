"""Transformers in GGUF files: what `from_single_file` of diffusers makes of them, without values.

Promises: the bytes of each block are stored and moved as they are in the file, and computed with by
diffusers' own layers, which turn one layer's at a time into numbers; the file's header has been
checked before a byte of it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from diffusers import GGUFQuantizationConfig
from diffusers.loaders.single_file_utils import SingleFileComponentError
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.offload.weights.forms import DTYPES
from offloadd.offload.weights.packed import Join, Parts, take_apart_by
from offloadd.store.index import CheckpointIndex
from offloadd.store.index.gguf import SUFFIX, BlockType, read_gguf

_PACKAGE = "gguf"
_BYTES = "bytes"

_STUMBLES = (
    *(KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError),
    SingleFileComponentError,
)
"""What the conversions of diffusers raise for the weights of another model, as seen."""


def is_gguf(path: Path) -> bool:
    """Whether a file is one by its name."""
    return path.name.lower().endswith(SUFFIX)


def index_gguf(path: Path) -> CheckpointIndex:
    """Check a file's header; raises `ModelLoadFailed` also where the library is not there."""
    if find_spec(_PACKAGE) is None:
        raise ModelLoadFailed(
            f"{path} is read with the package {_PACKAGE}, which is not installed",
            hint="install it beside the daemon: pip install 'offloadd[quantization]'",
            details={"kind": "not_installed", "package": _PACKAGE},
        )
    return read_gguf(path, _block_types())


def blank_from_gguf(
    kind: type[Any], directory: Path, index: CheckpointIndex, dtype: torch.dtype
) -> nn.Module:
    """The module that `load_gguf` gives, with weights and buffers on meta.

    Raises `ValueError` for a file whose weights are not those that the configuration wants.
    """
    parameter = _parameter_class()
    types = {one.name: number for number, one in _block_types().items()}
    blank: dict[str, torch.Tensor] = {}
    for name, place in index.tensors.items():
        values = torch.empty(place.spec.shape, dtype=DTYPES[place.spec.dtype], device="meta")
        block = index.metadata.get(name)
        blank[name] = values if block is None else parameter(values, quant_type=_type(types[block]))
    try:
        return _from_single_file(kind, blank, directory, dtype, device="meta")
    except _STUMBLES as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{index.location} holds no {kind.__name__} of this configuration "
            f"({type(error).__name__}: {told})"
        ) from error


def load_gguf(kind: type[Any], path: Path, directory: Path, dtype: torch.dtype) -> nn.Module:
    """The module with its weights in plain memory; `directory` holds its configuration."""
    _parameter_class()
    return _from_single_file(kind, str(path), directory, dtype)


def _from_single_file(
    kind: type[Any], weights: Any, directory: Path, dtype: torch.dtype, **more: Any
) -> nn.Module:
    made: nn.Module = kind.from_single_file(
        weights,
        config=str(directory),
        quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
        dtype=dtype,
        local_files_only=True,
        **more,
    )
    return made.eval()


def _block_types() -> dict[int, BlockType]:
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES
    from gguf import GGML_QUANT_SIZES

    return {
        int(one): BlockType(one.name, *GGML_QUANT_SIZES[one]) for one in SUPPORTED_GGUF_QUANT_TYPES
    }


def _type(number: int) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(number)


def _parameter_class() -> type[Any]:
    from diffusers.quantizers.gguf.utils import GGUFParameter

    take_apart_by(GGUFParameter, _take_apart)
    found: type[Any] = GGUFParameter
    return found


def _take_apart(weight: Any) -> tuple[Parts, Join]:
    kind, quant_type = type(weight), weight.quant_type

    def join(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        joined: torch.Tensor = kind(parts[_BYTES], quant_type=quant_type)
        return joined

    return {_BYTES: weight.as_tensor()}, join
