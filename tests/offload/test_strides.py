"""Weights whose strides matter, layers with paths of their own, and weights that cannot stream."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload.cast_sources import cast_source
from offload.rig import cpu_device, disk_source, host_source, simulated_device
from offload.tiny_adapters import lora
from offload.tiny_models import TINY_MODELS
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.engine import Engine
from offloadd.offload.grouping.groups import GroupOptions
from offloadd.offload.weights.casting import Casting
from offloadd.offload.weights.forms import form_of, stored_form
from offloadd.store.layout import TensorSpec

BLOCKS = GroupOptions("block_level", small_limit_bytes=0)
LEAVES = GroupOptions("leaf_level", small_limit_bytes=2048)
EVERY_LEAF = GroupOptions("leaf_level", small_limit_bytes=0)
PLACES: dict[str, tuple[Callable[[], Accelerator], bool]] = {
    "disk": (cpu_device, False),
    "in_place": (cpu_device, True),
    "link": (simulated_device, True),
}


def _stream(
    module: nn.Module,
    call: Callable[[], torch.Tensor],
    expected: torch.Tensor,
    directory: Path,
    place: str,
    options: GroupOptions = LEAVES,
    shares: tuple[float, ...] = (2.0, 0.9),
) -> None:
    """Stream the module within these shares of its bytes, and hold every step to the number."""
    make_device, in_memory = PLACES[place]
    open_source: Any = host_source if in_memory else disk_source
    with open_source(module, directory / "w.safetensors") as source:
        engine = Engine(make_device(), 4 * source.layout.size_bytes)
        engine.attach("m", module, source, options)
        for share in shares:
            engine.replan(budget_bytes=int(share * source.layout.size_bytes))
            for _ in range(4):
                assert torch.equal(call(), expected)
                stats = engine.stats()
                assert stats.resident_bytes + stats.ring_bytes <= stats.budget_bytes
        engine.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [BLOCKS, LEAVES], ids=["blocks", "leaves"])
@pytest.mark.parametrize("name", ["sd_unet", "vae"])
def test_channels_last_weights_keep_their_strides_and_numbers(
    name: str, options: GroupOptions, place: str, tmp_path: Path
) -> None:
    family = TINY_MODELS[name]
    module = family.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    strides = {key: weight.stride() for key, weight in module.named_parameters()}
    expected = family.run(module, family.example_inputs())
    _stream(
        module,
        lambda: family.run(module, family.example_inputs()),
        expected,
        tmp_path,
        place,
        options,
    )
    assert {key: weight.stride() for key, weight in module.named_parameters()} == strides


def test_channels_last_and_casting_go_together(tmp_path: Path) -> None:
    family, casting = TINY_MODELS["sd_unet"], Casting(torch.float8_e4m3fn)
    inputs = family.example_inputs(0, torch.bfloat16)

    def build() -> Any:
        module: Any = family.build(dtype=torch.bfloat16)
        return module.to(memory_format=torch.channels_last)

    reference, module = build(), build()
    reference.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    expected = family.run(reference, inputs)
    with cast_source(module, casting, tmp_path / "p", in_memory=True) as source:
        engine = Engine(simulated_device(), source.layout.size_bytes)
        engine.attach("m", module, source, LEAVES, casting)
        for _ in range(4):
            assert torch.equal(family.run(module, inputs), expected)
        engine.close()


def test_adapters_fuse_into_channels_last_weights(tmp_path: Path) -> None:
    family = TINY_MODELS["sd_unet"]

    def build() -> Any:
        module: Any = family.build()
        return module.to(memory_format=torch.channels_last)

    plain, module = build(), build()
    state = lora(plain, ("conv1", "to_q"))
    plain.load_lora_adapter(dict(state), prefix=None, adapter_name="a")
    beside = family.run(plain, family.example_inputs())
    plain.fuse_lora()
    fused = family.run(plain, family.example_inputs())
    with host_source(module, tmp_path / "w") as source:
        engine = Engine(simulated_device(), source.layout.size_bytes)
        engine.attach("m", module, source, LEAVES)
        with engine.changing_adapters("m"):
            module.load_lora_adapter(dict(state), prefix=None, adapter_name="a")
        for change, expected in ((engine.fuse, fused), (engine.unfuse, beside)):
            change("m")
            for _ in range(3):
                assert torch.equal(family.run(module, family.example_inputs()), expected)
        engine.close()


class _Transposed(nn.Module):
    """A weight stored as the transpose of what its checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 16)
        self.second = nn.Linear(16, 8)
        self.second.weight = nn.Parameter(torch.randn(16, 8).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


@pytest.mark.parametrize("place", PLACES)
def test_a_transposed_weight_keeps_its_strides_and_numbers(place: str, tmp_path: Path) -> None:
    module = _Transposed().requires_grad_(False)
    x = torch.linspace(-1, 1, 24 * 5).view(5, 24)
    with torch.no_grad():
        _stream(module, lambda: module(x), module(x), tmp_path, place, EVERY_LEAF, (3.0, 2.3))
    assert module.second.weight.stride() == (1, 8)


def _encoder(norm_first: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    # Nested tensors are the default, and are used where norms come last.
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=not norm_first)
    return encoder.eval().requires_grad_(False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [BLOCKS, LEAVES], ids=["blocks", "leaves"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_transformer_encoder_layers_compute_what_the_plain_ones_compute(
    norm_first: bool, options: GroupOptions, place: str, tmp_path: Path
) -> None:
    x = torch.linspace(-1, 1, 2 * 7 * 32).view(2, 7, 32)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    plain, streamed = _encoder(norm_first), _encoder(norm_first)
    with torch.no_grad():
        for mask in (None, padding):
            expected = plain(x, src_key_padding_mask=mask)
            call = functools.partial(streamed, x, src_key_padding_mask=mask)
            _stream(streamed, call, expected, tmp_path, place, options)
            streamed = _encoder(norm_first)


def test_an_encoder_layer_that_is_streamed_by_itself_is_let_go_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval().requires_grad_(False)
    x = torch.linspace(-1, 1, 2 * 7 * 32).view(2, 7, 32)
    with torch.no_grad():
        call = functools.partial(module, x)
        _stream(module, call, module(x), tmp_path, "link", shares=(2.0, 1.2))
    assert "forward" not in vars(module)
    gone = weakref.ref(module)
    del module, call
    assert gone() is None


def test_an_exception_inside_an_encoder_layer_leaves_the_next_call_right(tmp_path: Path) -> None:
    module, x = _encoder(norm_first=True), torch.linspace(-1, 1, 2 * 7 * 32).view(2, 7, 32)
    with torch.no_grad(), disk_source(module, tmp_path / "w.safetensors") as source:
        expected = module(x)
        engine = Engine(cpu_device(), source.layout.size_bytes)
        engine.attach("m", module, source, BLOCKS)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shape"):
                module(x[..., :16])
            assert torch.equal(module(x), expected)
        engine.close()


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return x


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [BLOCKS, LEAVES], ids=["blocks", "leaves"])
def test_multihead_attention_computes_what_the_plain_one_computes(
    options: GroupOptions, place: str, tmp_path: Path
) -> None:
    module = _Attends().eval().requires_grad_(False)
    x = torch.linspace(-1, 1, 2 * 7 * 32).view(2, 7, 32)
    with torch.no_grad():
        _stream(module, lambda: module(x), module(x), tmp_path, place, options)


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_any_dense_order_is_a_form_that_holds_the_same_values(
    order: list[int], shape: list[int]
) -> None:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    permuted = values.permute(order)
    form = form_of(permuted)
    assert form is not None
    assert form.stride == permuted.stride()
    spec = TensorSpec("w", "F32", tuple(permuted.shape))
    memory = torch.empty(form.size_bytes, dtype=torch.uint8)
    form.over(memory).copy_(permuted)
    assert torch.equal(form.over(memory), permuted)
    as_stored = permuted.contiguous().flatten().view(torch.uint8)
    assert form.is_stored_as(spec) == torch.equal(memory, as_stored) or form.size_bytes <= 4 * 6
    assert not form.is_stored_as(spec) or torch.equal(memory, as_stored)


def test_a_weight_that_shares_memory_with_itself_is_taken_row_by_row() -> None:
    form = form_of(torch.zeros(3).expand(4, 3))
    assert form == stored_form(TensorSpec("w", "F32", (4, 3)))


class _Packed(nn.Parameter):
    """A quantised weight as libraries make them: a subclass with its values in an inner tensor."""

    packed: torch.Tensor

    def __new__(cls, inner: torch.Tensor) -> _Packed:
        made: _Packed = torch.Tensor._make_subclass(cls, torch.empty(8, 8, device="meta"), False)
        made.packed = inner
        return made


def test_case_54_a_weight_of_a_subclass_is_refused_by_name_and_left_as_it_was(
    tmp_path: Path,
) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    with host_source(module, tmp_path / "w") as source:
        inner = torch.arange(64, dtype=torch.int8)
        module[1]._parameters["weight"] = packed = _Packed(inner)
        engine = Engine(simulated_device(), 1 << 20)
        with pytest.raises(ModelLoadFailed, match=r"`1\.weight` is a _Packed") as refused:
            engine.attach("m", module, source, LEAVES)
        assert refused.value.details["tensor"] == "1.weight"
        assert 'offload = "none"' in str(refused.value)
        assert module[1].weight is packed
        assert packed.packed is inner
        assert engine.stats().components == ()
