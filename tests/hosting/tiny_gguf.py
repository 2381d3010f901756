"""Transformers in GGUF files, as the tools that quantise them write these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import torch

BLOCK = 32


def save_gguf(
    file: Path, weights: Mapping[str, torch.Tensor], kind: gguf.GGMLQuantizationType
) -> Path:
    """Write weights: matrices whose rows are whole blocks in blocks, all else as it is."""
    writer = gguf.GGUFWriter(str(file), "flux")
    for name, tensor in weights.items():
        values = tensor.detach().float().numpy()
        if values.ndim == 2 and values.shape[1] % BLOCK == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
