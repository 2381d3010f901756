"""A tied weight has one owner, and every reader finds it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload.group_runner import GroupRunner
from offload.groupings import OPTIONS, Chain, assert_sound, every_option
from offload.tiny_models import TINY_MODELS

from offloadd.offload.grouping.groups import GroupOptions, group_module


@pytest.mark.parametrize("family", ["t5", "umt5"])
@every_option
def test_case_3_a_tied_embedding_has_one_owner_and_all_its_readers(
    family: str, options: GroupOptions
) -> None:
    grouping = group_module(TINY_MODELS[family].build(), options)
    owner = next(group for group in grouping.groups if "shared" in group.anchors)
    assert owner.anchors == ("shared", "encoder.embed_tokens")
    assert owner.tensors[0].aliases == (("encoder.embed_tokens", "weight"),)


def test_case_3_a_weight_of_two_blocks_stays_on_the_device() -> None:
    module = Chain()
    module.blocks[2].lin.weight = module.blocks[0].lin.weight  # type: ignore[union-attr]
    grouping = group_module(module, GroupOptions())
    assert_sound(module, grouping)
    tied = next(tensor for tensor in grouping.leftovers if tensor.kind == "parameter")
    assert tied.places == (("blocks.0.lin", "weight"), ("blocks.2.lin", "weight"))


def test_a_layer_that_two_blocks_register_has_one_owner() -> None:
    module = Chain()
    module.blocks[3].lin = module.blocks[1].lin
    for options in OPTIONS:
        grouping = group_module(module, options)
        assert_sound(module, grouping)
    leaf = group_module(module, OPTIONS[3])
    assert [group.anchors for group in leaf.groups if "lin" in group.name] == [
        ("blocks.0.lin",),
        ("blocks.1.lin",),
        ("blocks.2.lin",),
    ]


@given(
    count=st.integers(1, 6),
    per_group=st.integers(1, 4),
    ties=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=4),
    leaf=st.booleans(),
    limit=st.sampled_from([None, 0, 100, 10_000]),
)
def test_any_ties_between_layers_leave_a_sound_grouping_that_computes(
    count: int, per_group: int, ties: list[tuple[int, int, bool]], leaf: bool, limit: int | None
) -> None:
    module = Chain(count).requires_grad_(False)
    for first, second, whole in ties:
        one, other = module.blocks[first % count], module.blocks[second % count]
        if whole:
            other.lin = one.lin
        else:
            other.lin.weight = one.lin.weight  # type: ignore[union-attr]
    options = GroupOptions("leaf_level" if leaf else "block_level", per_group, None, limit)
    x = torch.ones(2, 8)
    expected = module(x)
    grouping = group_module(module, options)
    assert_sound(module, grouping)

    runner = GroupRunner(module, grouping)
    assert torch.equal(module(x), expected)
    assert runner.reads.reads == ()
    assert runner.most_in_use <= 1
