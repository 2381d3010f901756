"""A tensor has one owner however many places and views hold it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.offload.grouping.ties import owned_tensors


class Pair(nn.Module):
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.first = nn.Parameter(first, requires_grad=False)
        self.second = nn.Parameter(second, requires_grad=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_parameters_that_view_the_same_bytes_have_one_owner(device: str) -> None:
    data = torch.zeros(4, 4, device=device)
    (tensor,) = owned_tensors(Pair(data, data.view(4, 4)))
    assert tensor.name == "first"
    assert tensor.aliases == [("", "second")]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_overlap_in_part_are_refused_by_name(device: str) -> None:
    data = torch.zeros(4, 4, device=device)
    for second in (data[1:], data[:2], data.t(), data.view(torch.int32)[3:]):
        with pytest.raises(ModelLoadFailed, match=r"`second` shares part.*`first`"):
            owned_tensors(Pair(data, second))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_slices_of_one_storage_that_do_not_overlap_are_tensors_of_their_own(device: str) -> None:
    data = torch.zeros(4, 4, device=device)
    assert [tensor.name for tensor in owned_tensors(Pair(data[:2], data[2:]))] == [
        "first",
        "second",
    ]


def test_an_empty_parameter_overlaps_nothing() -> None:
    data = torch.zeros(4)
    assert len(owned_tensors(Pair(data, data[2:2]))) == 2


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros(3, dtype=torch.complex128), "complex128"),
    ],
)
def test_weights_that_no_layout_holds_are_refused(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(ModelLoadFailed, match=f"`second`.*{why}"):
        owned_tensors(Pair(torch.zeros(3), tensor))


def test_uninitialised_parameters_are_refused() -> None:
    with pytest.raises(ModelLoadFailed, match=r"`weight` is a UninitializedParameter"):
        owned_tensors(nn.LazyLinear(3))


def test_a_modules_own_tensors_come_before_its_childrens_in_the_order_of_registration() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    module[1].register_parameter("bare", nn.Parameter(torch.zeros(1)))
    assert [tensor.name for tensor in owned_tensors(module)] == [
        "0.weight",
        "0.bias",
        "1.bare",
        "1.0.weight",
        "1.0.bias",
        "1.0.running_mean",
        "1.0.running_var",
        "1.0.num_batches_tracked",
    ]
