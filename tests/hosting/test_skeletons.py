"""Modules built without weights equal what `from_pretrained` builds, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from hosting.hosting_help import device_host
from offload.tiny_models import TINY_MODELS
from safetensors.torch import load_file, save_file
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.channel.specs import OffloadSpec
from offloadd.hosting.device_host import Supplier
from offloadd.hosting.loading import parts, plain_loading
from offloadd.hosting.loading.parts import build_part, finish_part
from offloadd.hosting.loading.stand_ins import class_to_build
from offloadd.hosting.loading.weights import Weights, unmatched_weights
from offloadd.hosting.packs import pack_writer
from offloadd.hosting.packs.packs import packed_weights, write_packs
from offloadd.store.index import ComponentFiles, read_checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def saved(module: Any, directory: Path) -> ComponentFiles:
    module.save_pretrained(directory)
    return files_at(directory, type(module))


def files_at(directory: Path, kind: type[Any]) -> ComponentFiles:
    return ComponentFiles(
        name="part",
        library=kind.__module__.partition(".")[0],
        class_name=kind.__name__,
        directory=directory,
        checkpoint=read_checkpoint(directory),
    )


def supply() -> Supplier:
    return device_host().supply("tiny", {"part": OffloadSpec()}, {})


def load_module(files: ComponentFiles, dtype: torch.dtype) -> tuple[nn.Module, Weights]:
    """A component without its weights, and where these are."""
    part = build_part(files, dtype, supply())
    write_packs([part.order] if part.order else [], lambda: None)
    weights, buffers = finish_part(part, supply(), lambda: None)
    for source in buffers:
        source.close()
    return part.module, weights


def whole(files: ComponentFiles, dtype: torch.dtype) -> nn.Module:
    """The component without its weights, and these put into it from where they are said to be."""
    module, weights = load_module(files, dtype)
    source = supply().open(files, weights, lambda: None)
    view = source.host_view()
    assert view is not None
    for name, slot in weights.layout.slots().items():
        data = bytearray(view[slot.offset_bytes : slot.stop_bytes])
        blank = module.get_parameter(name)
        value = torch.frombuffer(data, dtype=blank.dtype).reshape(blank.shape)
        filled = nn.Parameter(value, requires_grad=blank.requires_grad)
        for owner in module.modules():
            for key, held in owner._parameters.items():
                if held is blank:
                    owner._parameters[key] = filled
    source.close()
    return module


def same(one: nn.Module, other: nn.Module) -> None:
    for listed in (nn.Module.named_parameters, nn.Module.named_buffers):
        here = dict(listed(one, remove_duplicate=False))
        there = dict(listed(other, remove_duplicate=False))
        assert here.keys() == there.keys()
        for name, tensor in here.items():
            assert tensor.dtype == there[name].dtype, name
            assert tensor.requires_grad == there[name].requires_grad, name
            assert torch.equal(tensor, there[name]), name
    assert not one.training


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_skeleton_with_its_weights_is_what_from_pretrained_builds(
    name: str, tmp_path: Path
) -> None:
    files = saved(TINY_MODELS[name].build(), tmp_path)
    kind: Any = type(TINY_MODELS[name].build())
    for dtype in DTYPES:
        same(whole(files, dtype), kind.from_pretrained(tmp_path, dtype=dtype))


def test_files_of_the_right_dtype_are_read_as_they_lie(tmp_path: Path) -> None:
    files = saved(TINY_MODELS["flux"].build(dtype=torch.bfloat16), tmp_path)
    _, weights = load_module(files, torch.bfloat16)
    assert files.checkpoint is not None
    assert weights.index.files == files.checkpoint.files


def test_layers_that_a_class_keeps_precise_are_precise(tmp_path: Path) -> None:
    files = saved(TINY_MODELS["wan"].build(), tmp_path)
    module, _ = load_module(files, torch.bfloat16)
    dtypes = {name: one.dtype for name, one in module.named_parameters()}
    assert dtypes["scale_shift_table"] == torch.float32
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}


def test_names_of_an_older_library_are_found_without_a_copy(tmp_path: Path) -> None:
    module: Any = TINY_MODELS["clip"].build()
    module.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    older = {f"text_model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(older, path, metadata={"format": "pt"})
    files = files_at(tmp_path, type(module))
    _, weights = load_module(files, torch.float32)
    assert files.checkpoint is not None
    assert weights.index.files == files.checkpoint.files
    same(whole(files, torch.float32), type(module).from_pretrained(tmp_path, dtype=torch.float32))


def test_a_buffer_that_a_file_holds_is_read(tmp_path: Path) -> None:
    module: Any = TINY_MODELS["prior"].build()
    held = dict(module.named_buffers())
    saved_names = [name for name in module.state_dict() if name in held]
    files = saved(module, tmp_path)
    built, _ = load_module(files, torch.float32)
    for name in saved_names:
        assert torch.equal(built.get_buffer(name), held[name])


def test_ties_survive_the_building(tmp_path: Path) -> None:
    module, weights = load_module(saved(TINY_MODELS["t5"].build(), tmp_path), torch.float32)
    assert module.get_parameter("shared.weight") is module.get_parameter(
        "encoder.embed_tokens.weight"
    )
    assert "encoder.embed_tokens.weight" not in weights.layout.slots()


class Peculiar(diffusers.PriorTransformer):  # type: ignore[misc]
    """A class that loads in its own way: the file's weights and buffers are doubled."""

    @classmethod
    def from_pretrained(cls, directory: Any, **options: Any) -> Any:
        module, news = super().from_pretrained(directory, **options)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data *= 2
        return module, news


class Unlike(diffusers.PriorTransformer):  # type: ignore[misc]
    """A class that loads more than its constructor builds."""

    @classmethod
    def from_pretrained(cls, directory: Any, **options: Any) -> Any:
        module, news = super().from_pretrained(directory, **options)
        module.register_parameter("more", nn.Parameter(torch.zeros(3)))
        return module, news


def built_and_packed(
    kind: type[Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> ComponentFiles:
    """A component of a class that only this process knows, whose pack is written here then."""
    files = saved(TINY_MODELS["prior"].build(), directory)
    for module in (parts, plain_loading):
        monkeypatch.setattr(module, "component_class", lambda *names: kind)
    order = build_part(files, torch.float32, supply()).order
    assert order is not None
    assert order.how == "load"
    pack_writer._WRITERS[order.how](order)
    return files


def test_a_class_that_loads_in_its_own_way_is_asked_to_by_the_writer_of_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = built_and_packed(Peculiar, tmp_path, monkeypatch)
    expected, _ = Peculiar.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert dict(expected.named_buffers())
    same(whole(files, torch.float32), expected)


def test_a_class_that_loads_what_its_configuration_does_not_say_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadFailed, match="'more'"):
        built_and_packed(Unlike, tmp_path, monkeypatch)


def test_a_class_that_stands_for_another_is_built_as_that_one(tmp_path: Path) -> None:
    files = saved(
        diffusers.Transformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=1,
            sample_size=8,
            patch_size=2,
            norm_type="ada_norm_zero",
            num_embeds_ada_norm=10,
        ),
        tmp_path / "dit",
    )
    expected = diffusers.Transformer2DModel.from_pretrained(tmp_path / "dit")
    assert type(expected) is diffusers.DiTTransformer2DModel
    read = whole(files, torch.float32)
    assert type(read) is type(expected)
    same(read, expected)
    _, weights = load_module(files, torch.float32)
    assert files.checkpoint is not None
    assert weights.index.files == files.checkpoint.files


@pytest.mark.parametrize(
    ("name", "automatic"),
    [
        ("vae", diffusers.AutoModel),
        ("clip", diffusers.AutoModel),
        ("clip", transformers.AutoModel),
    ],
)
def test_an_automatic_class_is_the_class_that_it_chooses(
    name: str, automatic: type[Any], tmp_path: Path
) -> None:
    module: Any = TINY_MODELS[name].build()
    module.save_pretrained(tmp_path)
    chosen = class_to_build("part", automatic, tmp_path)
    assert chosen is type(automatic.from_pretrained(str(tmp_path)))


def test_the_pack_of_a_class_that_loads_by_itself_holds_what_it_loaded(tmp_path: Path) -> None:
    files = saved(TINY_MODELS["vae"].build(), tmp_path)
    assert files.checkpoint is not None
    kind: Any = type(TINY_MODELS["vae"].build())
    module = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    unread = unmatched_weights(module, files.checkpoint, None)
    order = supply().packs("part").order("load", files, unread, torch.bfloat16)
    write_packs([order], lambda: None)
    weights = packed_weights(order, unread)
    source = supply().open(files, weights, lambda: None)
    view = source.host_view()
    assert view is not None
    for name, slot in weights.layout.slots().items():
        stored = torch.frombuffer(
            bytearray(view[slot.offset_bytes : slot.stop_bytes]), dtype=torch.bfloat16
        )
        assert torch.equal(stored.reshape(slot.spec.shape), module.get_parameter(name))
    source.close()
