"""A weight that is read while absent has its real values, and moves to whoever reads it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from offload.group_runner import GroupRunner
from torch import nn

from offloadd.offload.grouping.grouping import Grouping
from offloadd.offload.grouping.groups import GroupOptions, group_module
from offloadd.offload.streaming.reads import StrayRead, regroup
from offloadd.offload.weights.absent import AbsentWeight, absent_weight

LEAVES = GroupOptions("leaf_level", small_limit_bytes=0)


class Reader(nn.Module):
    """Uses its child's weight without calling the child, as some attention modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.gate(x), self.inner.weight, self.inner.bias)


class Model(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.readers = nn.ModuleList([Reader() for _ in range(count)])
        self.table = nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for reader in self.readers:
            x = reader(x)
        # The head's own forward is never called.
        return x @ self.head.weight

    def look_up(self, row: int) -> torch.Tensor:
        return self.table.weight[row]


def built(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().eval().requires_grad_(False)


def run_under(grouping_of: GroupOptions | Grouping) -> tuple[torch.Tensor, GroupRunner, Grouping]:
    module = built()
    grouping = (
        group_module(module, grouping_of) if isinstance(grouping_of, GroupOptions) else grouping_of
    )
    runner = GroupRunner(module, grouping)
    return module(torch.ones(2, 8)), runner, grouping


def test_stray_reads_have_the_right_values_and_name_their_reader() -> None:
    result, runner, _ = run_under(LEAVES)
    assert torch.equal(result, built()(torch.ones(2, 8)))
    assert set(runner.reads.reads) == {
        StrayRead(("head", "weight"), ""),
        *(StrayRead((f"readers.{n}.inner", "weight"), f"readers.{n}") for n in range(4)),
        *(StrayRead((f"readers.{n}.inner", "bias"), f"readers.{n}") for n in range(4)),
    }


def test_regrouping_leaves_no_stray_read_and_the_same_layout() -> None:
    expected, runner, grouping = run_under(LEAVES)
    regrouped = regroup(grouping, runner.reads.reads)
    result, runner, _ = run_under(regrouped)
    assert torch.equal(result, expected)
    assert runner.reads.reads == ()
    assert runner.most_in_use == 1
    assert regrouped.layout == grouping.layout


def test_groups_inside_a_reader_become_one() -> None:
    _, runner, grouping = run_under(LEAVES)
    regrouped = regroup(grouping, runner.reads.reads)
    group = next(group for group in regrouped.groups if group.name == "readers.1")
    assert group.anchors[0] == "readers.1"
    assert {tensor.owner for tensor in group.tensors} == {"readers.1.inner", "readers.1.gate"}
    assert [group.index for group in regrouped.groups] == list(range(len(regrouped.groups)))


def test_a_weight_that_the_whole_model_reads_stays_on_the_device() -> None:
    _, runner, grouping = run_under(LEAVES)
    regrouped = regroup(grouping, runner.reads.reads)
    stays = {tensor.spec.name: tensor.size_bytes for tensor in regrouped.leftovers}
    assert stays == {"head.weight": 256}
    assert regrouped.leftover_bytes == 256
    head = next(group for group in regrouped.groups if group.name == "head")
    assert [tensor.attribute for tensor in head.tensors] == ["bias"]


def test_case_2_a_weight_that_a_helper_reads_outside_any_forward_stays() -> None:
    module = built()
    expected = module.look_up(3).clone()
    grouping = group_module(module, LEAVES)
    runner = GroupRunner(module, grouping)
    assert torch.equal(module.look_up(3), expected)
    (read,) = runner.reads.reads
    assert read == StrayRead(("table", "weight"), None)

    regrouped = regroup(grouping, [read])
    assert [tensor.spec.name for tensor in regrouped.leftovers] == ["table.weight"]
    assert not any(group.name == "table" for group in regrouped.groups)


def test_a_reader_of_nothing_else_becomes_an_anchor() -> None:
    class Borrower(nn.Module):
        def forward(self, x: torch.Tensor, lender: nn.Linear) -> torch.Tensor:
            return x @ lender.weight

    class Lending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lender = nn.Linear(8, 8)
            self.borrower = Borrower()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.borrower(self.lender(x), self.lender)
            return result

    module = Lending().requires_grad_(False)
    grouping = group_module(module, LEAVES)
    runner = GroupRunner(module, grouping)
    module(torch.ones(1, 8))
    regrouped = regroup(grouping, runner.reads.reads)
    assert [group.anchors for group in regrouped.groups] == [("lender", "borrower")]


def test_a_small_layer_that_is_called_past_its_hooks_stays() -> None:
    module = built()
    grouping = group_module(module, LEAVES)
    runner = GroupRunner(module, grouping)
    module.head.forward(torch.ones(1, 8))
    regrouped = regroup(grouping, runner.reads.reads)
    assert [tensor.owner for tensor in regrouped.leftovers] == ["head", "head"]


def test_a_read_of_what_stays_changes_nothing() -> None:
    _, _, grouping = run_under(LEAVES)
    once = regroup(grouping, [StrayRead(("head", "weight"), None)])
    assert regroup(once, [StrayRead(("head", "weight"), None)]) == once
    assert regroup(grouping, []) == grouping


def test_multihead_attention_computes_as_if_its_weights_had_never_left() -> None:
    # Its fast path reads all weights at once, and a function mode would make it take another path.
    torch.manual_seed(0)
    module = nn.Sequential(nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 16))
    module = module.eval().requires_grad_(False)
    x = torch.randn(1, 5, 16)
    expected = module[0](x, x, x, need_weights=False)[0]
    runner = GroupRunner(module, group_module(module, LEAVES))
    assert torch.equal(module[0](x, x, x, need_weights=False)[0], expected)
    assert runner.reads.reads == ()


def an_absent_weight() -> tuple[AbsentWeight, torch.Tensor, GroupRunner]:
    module = nn.Sequential(nn.Linear(3, 2, dtype=torch.bfloat16)).requires_grad_(False)
    real = module[0].weight
    runner = GroupRunner(module, group_module(module, LEAVES))
    absent = module[0].weight
    assert isinstance(absent, AbsentWeight)
    assert isinstance(real, torch.Tensor)
    return absent, real, runner


def test_what_an_absent_weight_says_of_itself_reads_nothing() -> None:
    absent, real, runner = an_absent_weight()
    assert (absent.shape, absent.dtype, absent.dim(), absent.numel(), len(absent)) == (
        real.shape,
        real.dtype,
        2,
        6,
        2,
    )
    assert absent.stride() == real.stride()
    assert absent.is_floating_point()
    assert isinstance(absent, nn.Parameter)
    assert not absent.requires_grad
    absent.requires_grad = False
    absent.requires_grad_(False)
    assert not absent.is_meta
    assert "0.weight" in repr(absent)
    assert isinstance(absent.detach(), AbsentWeight)
    assert isinstance(absent.data, AbsentWeight)
    assert runner.reads.reads == ()


def test_case_6_an_absent_weight_answers_the_execution_device() -> None:
    absent, _, runner = an_absent_weight()
    assert absent.device == torch.device("cpu")
    assert absent.is_cpu
    assert not absent.is_cuda
    assert torch.ones(1).to(absent.device).device.type == "cpu"
    assert runner.reads.reads == ()


def test_a_result_never_shares_memory_with_the_weight_that_was_read() -> None:
    absent, real, _ = an_absent_weight()
    for result in (
        absent.t(),
        absent[0],
        absent.contiguous(),
        absent.view(3, 2),
        absent.to(absent),
    ):
        assert not isinstance(result, AbsentWeight)
        assert result.untyped_storage().data_ptr() != real.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([absent, absent]), torch.cat([real, real]))
    assert all(torch.equal(a, b) for a, b in zip(absent.unbind(), real.unbind(), strict=True))


def test_memory_that_is_given_to_others_than_torch_is_a_copy() -> None:
    real = torch.ones(2, 2)
    module = nn.Linear(2, 2, bias=False).requires_grad_(False)
    module.weight = nn.Parameter(real, requires_grad=False)
    GroupRunner(module, group_module(module, LEAVES))
    for array in (module.weight.numpy(), np.asarray(module.weight)):
        array[0, 0] = 7.0
        assert real[0, 0] == 1.0
    assert module.weight.untyped_storage().data_ptr() != real.untyped_storage().data_ptr()


def test_a_copy_of_a_module_has_weights_of_its_own() -> None:
    absent, real, _ = an_absent_weight()
    copied = copy.deepcopy(absent)
    assert type(copied) is nn.Parameter
    assert torch.equal(copied, real)


def test_nothing_writes_to_an_absent_weight() -> None:
    absent, real, _ = an_absent_weight()
    before = real.clone()
    with pytest.raises(RuntimeError, match=r"`0\.weight`.*cannot be written"):
        absent.zero_()
    with pytest.raises(RuntimeError, match="cannot be written"):
        absent[0] = 1.0
    with pytest.raises(RuntimeError, match="cannot be written"):
        absent.data = torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="cannot be written"):
        torch.add(real, real, out=absent)
    assert torch.equal(real, before)


def test_an_absent_weight_holds_no_memory() -> None:
    absent, _, runner = an_absent_weight()
    with pytest.raises(ValueError, match="holds memory"):
        absent_weight(torch.zeros(2), ("", "weight"), runner.reads)
    with torch._C.DisableTorchFunctionSubclass():
        assert absent.is_meta


def test_a_module_with_absent_weights_is_grouped_as_before() -> None:
    module = built()
    grouping = group_module(module, LEAVES)
    runner = GroupRunner(module, grouping)
    assert group_module(module, LEAVES) == grouping
    assert runner.reads.reads == ()
