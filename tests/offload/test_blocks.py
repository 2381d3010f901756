"""Blocks are found by what repeats, and split where one of them would be most of the model."""

from __future__ import annotations

import torch
from torch import nn

from offloadd.offload.grouping.groups import GroupOptions, group_module


class Layer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)


class Stage(nn.Module):
    """Layers, and a little around them."""

    def __init__(self, count: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(count)])
        self.out = nn.Linear(width, width)


class Experts(nn.Module):
    """A block whose repeated parts are the smaller half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
        self.experts = nn.ModuleList([Layer(8), Layer(8)])


def names(module: nn.Module, options: GroupOptions | None = None) -> list[str]:
    chosen = options or GroupOptions(small_limit_bytes=0)
    return [group.name for group in group_module(module, chosen).groups]


class Holder(nn.Module):
    def __init__(self, *members: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(members)


def test_the_outermost_repeated_modules_are_blocks_when_they_are_small() -> None:
    module = Holder(*(Stage(2) for _ in range(20)))
    assert names(module) == [f"stages.{index}" for index in range(20)]


def test_a_block_that_is_much_of_the_model_is_split_at_the_blocks_inside_it() -> None:
    module = Holder(*(Stage(1) for _ in range(20)), Stage(12))
    found = names(module)
    assert found[:20] == [f"stages.{index}" for index in range(20)]
    assert found[20:] == [*(f"stages.20.layers.{index}" for index in range(12)), "stages.20.out"]


def test_a_block_without_blocks_inside_stays_whole_however_large() -> None:
    assert names(Holder(Layer(64), Layer(64))) == ["stages.0", "stages.1"]


def test_a_block_of_which_the_repeated_parts_are_the_lesser_half_stays_whole() -> None:
    assert names(Holder(Experts(), Experts())) == ["stages.0", "stages.1"]


def test_modules_of_different_classes_are_no_blocks_but_what_they_repeat_is() -> None:
    assert names(Holder(Stage(2), Experts())) == [
        "stages.0.layers.0",
        "stages.0.layers.1",
        "stages.0.out",
        "stages.1.shared.0",
        "stages.1.shared.1",
        "stages.1.experts.0",
        "stages.1.experts.1",
    ]


def test_a_sequential_of_blocks_is_cut_and_a_sequential_of_layers_is_not_blocks() -> None:
    assert names(nn.Sequential(Layer(), Layer())) == ["0", "1"]
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    options = GroupOptions(num_blocks_per_group=3, small_limit_bytes=0)
    assert names(layers, options) == ["0", "2", "3"]


def test_a_lowest_layer_between_blocks_ends_a_run_of_them() -> None:
    module = Holder(Layer(), Layer(), nn.Linear(4, 4), Layer())
    options = GroupOptions(num_blocks_per_group=2, small_limit_bytes=0)
    assert names(module, options) == ["stages.0-stages.1", "stages.2", "stages.3"]


def test_modules_without_parameters_come_to_nothing() -> None:
    assert names(Holder(nn.Dropout(), Layer(), nn.Identity(), Layer())) == ["stages.1", "stages.3"]
    assert names(nn.Identity()) == []


def test_a_layer_by_itself_is_a_group_and_a_custom_one_stays_for_its_helpers() -> None:
    class Normaliser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(4))

    assert names(nn.Linear(4, 4)) == [""]
    assert names(Normaliser()) == []


def test_an_explicit_limit_decides_which_layers_stay() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(8, 8, bias=False))
    for limit_bytes, expected in [(0, ["0", "1"]), (64, ["1"]), (255, ["1"]), (256, [])]:
        options = GroupOptions("leaf_level", small_limit_bytes=limit_bytes)
        assert names(module, options) == expected
