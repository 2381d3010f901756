"""Random LoRA adapters for tiny models, in the form that diffusers and peft load."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

StateDict = dict[str, torch.Tensor]

ATTENTION = ("to_q", "to_k", "to_v")


def lora(
    module: nn.Module, targets: Iterable[str] = ATTENTION, *, rank: int = 4, seed: int = 1
) -> StateDict:
    """An adapter of every Linear or Conv2d whose path ends in one of the targets."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    weights: StateDict = {}
    for path, layer in module.named_modules():
        if path.rpartition(".")[2] not in tuple(targets):
            continue
        if isinstance(layer, nn.Linear):
            weights[f"{path}.lora_A.weight"] = random(rank, layer.in_features)
            weights[f"{path}.lora_B.weight"] = random(layer.out_features, rank)
        elif isinstance(layer, nn.Conv2d):
            kernel = (layer.kernel_size[0], layer.kernel_size[1])
            weights[f"{path}.lora_A.weight"] = random(rank, layer.in_channels, *kernel)
            weights[f"{path}.lora_B.weight"] = random(layer.out_channels, rank, 1, 1)
    assert weights
    return weights
