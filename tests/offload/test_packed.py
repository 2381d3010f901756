"""Weights put together from several tensors: their bytes, their parts, and reads while absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from offloadd.offload.grouping.ties import owned_tensors
from offloadd.offload.weights.absent import Place, absent_weight
from offloadd.offload.weights.packed import memory_of, packed_form

CONFIGS = [Int8WeightOnlyConfig, Float8WeightOnlyConfig]


def quantised(config: type, device: str = "cpu") -> nn.Linear:
    layer = nn.Linear(40, 24, dtype=torch.bfloat16, device=device)
    quantize_(layer, config(set_inductor_config=False))
    return layer


@pytest.mark.parametrize("config", CONFIGS)
def test_a_weight_comes_back_from_its_bytes_without_being_copied(config: type) -> None:
    layer = quantised(config)
    form = packed_form(layer.weight)
    assert form is not None
    assert form == packed_form(quantised(config, "meta").weight)
    assert form.size_bytes < layer.weight.numel() + 256 * len(form.parts) + 4 * 24
    memory = form.stored(layer.weight)
    again = form.over(memory)
    x = torch.linspace(-1, 1, 3 * 40, dtype=torch.bfloat16).view(3, 40)
    assert torch.equal(functional.linear(x, again, layer.bias), layer(x))
    start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel()
    assert all(start <= one.data_ptr() < stop for one in memory_of(again))


@pytest.mark.parametrize("config", CONFIGS)
def test_it_is_one_weight_of_bytes_to_the_engine(config: type) -> None:
    weight, bias = owned_tensors(quantised(config, "meta"))
    assert (weight.name, weight.spec.dtype, weight.form) == (
        "weight",
        "U8",
        packed_form(quantised(config).weight),
    )
    assert bias.spec.dtype == "BF16"


class _Reader:
    device = torch.device("cpu")

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    @contextmanager
    def reading(self, place: Place) -> Iterator[torch.Tensor]:
        yield self._weight


@pytest.mark.parametrize("config", CONFIGS)
def test_one_that_is_absent_answers_as_itself_and_is_read_where_it_is_needed(config: type) -> None:
    layer = quantised(config)
    form = packed_form(layer.weight)
    assert form is not None
    absent = absent_weight(form.face(), ("", "weight"), _Reader(layer.weight))
    assert (absent.dtype, absent.shape, absent.device) == (
        layer.weight.dtype,
        layer.weight.shape,
        layer.weight.device,
    )
    x = torch.linspace(-1, 1, 3 * 40, dtype=torch.bfloat16).view(3, 40)
    assert torch.equal(functional.linear(x, absent, layer.bias), layer(x))
