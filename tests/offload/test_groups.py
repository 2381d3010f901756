"""Groups hold every weight once, in one contiguous range, and suffice to compute with."""

from __future__ import annotations

import pytest
import torch
from offload.group_runner import GroupRunner
from offload.groupings import OPTIONS, Chain, assert_sound, every_family, every_option, on_meta
from offload.tiny_models import TINY_MODELS
from torch import nn

from offload_protocol.errors import InvalidRequest, ModelLoadFailed
from offloadd.offload.grouping.groups import GroupOptions, group_module, module_layout


@every_family
@every_option
def test_every_tensor_belongs_to_one_group_or_the_leftovers(
    family: str, options: GroupOptions
) -> None:
    module = TINY_MODELS[family].build()
    assert_sound(module, group_module(module, options))


@every_family
@every_option
def test_a_model_computes_with_one_group_present_at_a_time(
    family: str, options: GroupOptions
) -> None:
    tiny = TINY_MODELS[family]
    inputs = tiny.example_inputs()
    expected = tiny.run(tiny.build(), inputs)
    module = tiny.build()
    runner = GroupRunner(module, group_module(module, options))

    result = tiny.run(module, inputs)

    assert torch.equal(result, expected)
    assert runner.reads.reads == ()
    assert runner.most_in_use == 1
    assert not runner.in_use


@every_family
def test_the_layout_is_the_same_whatever_the_options_and_whether_weights_are_there(
    family: str,
) -> None:
    module = TINY_MODELS[family].build()
    expected = module_layout(module)
    groupings = [group_module(module, options) for options in OPTIONS]
    assert all(grouping.layout == expected for grouping in groupings)

    absent = on_meta(TINY_MODELS[family].build())
    assert [group_module(absent, options) for options in OPTIONS] == groupings


@every_family
def test_small_layers_take_at_most_a_share_of_the_device(family: str) -> None:
    for options in OPTIONS[:3]:
        module = TINY_MODELS[family].build()
        grouping = group_module(module, options)
        parameters = sum(p.numel() * p.element_size() for p in module.parameters())
        layers = sum(
            tensor.size_bytes
            for tensor in grouping.leftovers
            if tensor.kind == "parameter" and "." in tensor.owner
        )
        assert layers <= parameters / 16


@pytest.mark.parametrize(
    ("family", "prefix", "count"),
    [
        ("t5", "encoder.block", 3),
        ("umt5", "encoder.block", 3),
        ("clip", "encoder.layers", 3),
        ("flux", "transformer_blocks", 2),
        ("flux", "single_transformer_blocks", 3),
        ("sd3", "transformer_blocks", 3),
        ("pixart", "transformer_blocks", 3),
        ("sana", "transformer_blocks", 3),
        ("wan", "blocks", 3),
        ("ltx", "transformer_blocks", 3),
        ("cogvideox", "transformer_blocks", 3),
        ("prior", "transformer_blocks", 3),
    ],
)
def test_blocks_are_found_at_any_depth(family: str, prefix: str, count: int) -> None:
    grouping = group_module(TINY_MODELS[family].build(), GroupOptions())
    names = {group.name for group in grouping.groups}
    assert {f"{prefix}.{index}" for index in range(count)} <= names


@pytest.mark.parametrize("family", ["sd_unet", "sdxl_unet", "vae", "wan_vae"])
def test_no_group_of_a_model_of_nested_blocks_is_most_of_it(family: str) -> None:
    grouping = group_module(TINY_MODELS[family].build(), GroupOptions())
    assert max(grouping.sizes_bytes()) < grouping.layout.size_bytes / 5


def test_blocks_that_follow_each_other_share_a_group() -> None:
    grouping = group_module(Chain(5), GroupOptions(num_blocks_per_group=2))
    assert [group.anchors for group in grouping.groups] == [
        ("blocks.0", "blocks.1"),
        ("blocks.2", "blocks.3"),
        ("blocks.4",),
    ]


def test_blocks_are_looked_for_only_in_the_modules_that_are_named() -> None:
    module = TINY_MODELS["flux"].build()
    options = GroupOptions(block_modules=("single_transformer_blocks",))
    names = [group.name for group in group_module(module, options).groups]
    assert "single_transformer_blocks.0" in names
    assert "transformer_blocks.0" not in names
    assert any(name.startswith("transformer_blocks.0.") for name in names)


def test_a_block_module_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="`layers`") as caught:
        group_module(Chain(), GroupOptions(block_modules=("layers",)))
    assert "blocks" in caught.value.hint


def test_a_group_of_no_blocks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="num_blocks_per_group"):
        group_module(Chain(), GroupOptions(num_blocks_per_group=0))


def test_a_module_with_large_parameters_of_its_own_moves_as_a_whole() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.MultiheadAttention(16, 2), nn.Linear(16, 16))
    grouping = group_module(module, GroupOptions("leaf_level"))
    assert [group.anchors for group in grouping.groups] == [("0",), ("1",), ("2",)]
    assert len(grouping.groups[1].tensors) == 4


def test_case_2_parameters_of_the_root_stay_for_its_helpers() -> None:
    for options in OPTIONS:
        module = TINY_MODELS["prior"].build()
        grouping = group_module(module, options)
        runner = GroupRunner(module, grouping)
        latents = torch.ones(1, 16)
        bare = dict(module.named_parameters())
        expected = latents * bare["clip_std"] + bare["clip_mean"]
        assert torch.equal(module.post_process_latents(latents), expected)  # type: ignore[operator]
        assert runner.reads.reads == ()


def test_buffers_stay_whether_they_are_saved_or_not() -> None:
    module = Chain()
    module.register_buffer("saved", torch.zeros(5, dtype=torch.complex128))
    grouping = group_module(module, GroupOptions())
    buffers = {tensor.spec.name: tensor for tensor in grouping.leftovers}
    assert set(buffers) == {"scale", "saved"}
    assert buffers["saved"].size_bytes == 80
    assert grouping.leftover_bytes == 2 * 256


def test_weights_of_a_quantised_class_are_refused_by_name() -> None:
    class Quantised(torch.Tensor):
        pass

    module = Chain()
    inner = torch.Tensor._make_subclass(Quantised, torch.zeros(8, 8), False)
    module.blocks[1].lin._parameters["weight"] = nn.Parameter(inner, requires_grad=False)  # type: ignore[union-attr]
    with pytest.raises(ModelLoadFailed, match=r"blocks\.1\.lin\.weight.*Quantised") as caught:
        group_module(module, GroupOptions())
    assert caught.value.details == {"tensor": "blocks.1.lin.weight"}
    assert caught.value.hint


def tiled(family: str, module: nn.Module) -> None:
    sizes = (
        {"tile_latent_min_size": 4, "tile_sample_min_size": 8}
        if family == "vae"
        else {
            "tile_sample_min_height": 8,
            "tile_sample_min_width": 8,
            "tile_sample_stride_height": 4,
            "tile_sample_stride_width": 4,
        }
    )
    module.enable_tiling()  # type: ignore[operator]
    for name, size in sizes.items():
        assert hasattr(module, name)
        setattr(module, name, size)


@pytest.mark.parametrize("family", ["vae", "wan_vae"])
@every_option
def test_case_1_and_50_encoding_and_tiled_decoding_need_no_forward_of_the_root(
    family: str, options: GroupOptions
) -> None:
    plain, streamed = TINY_MODELS[family].build(), TINY_MODELS[family].build()
    runner = GroupRunner(streamed, group_module(streamed, options))
    picture = torch.randn(1, 3, 16, 16) if family == "vae" else torch.randn(1, 3, 5, 16, 16)
    latents = TINY_MODELS[family].example_inputs()["z"]
    calls = []
    for _ in range(2):
        before = len(runner.acquired)
        with torch.no_grad():
            for entry, argument in (("encode", picture), ("decode", latents)):
                expected, result = (
                    getattr(module, entry)(argument, return_dict=False)[0]
                    for module in (plain, streamed)
                )
                if entry == "encode":
                    expected, result = expected.mode(), result.mode()
                assert torch.equal(result, expected)
        calls.append(len(runner.acquired) - before)
        tiled(family, plain)
        tiled(family, streamed)
    assert calls[1] > calls[0]
    assert runner.reads.reads == ()
