"""Components quantised when they are loaded, or saved so, give the picture of a plain script."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from hosting.hosting_help import (
    SEED,
    Drawn,
    call_arguments,
    device_host,
    draw,
    host,
    host_without_room,
    new_device_host,
)
from hosting.tiny_adapter_files import ATTENTION, save_adapter, sd_adapter
from offload.rig import simulated_device
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

from offload_protocol.errors import InvalidRequest, ModelLoadFailed
from offload_protocol.messages import AdapterChoice
from offloadd.channel.checked_specs import model_spec
from offloadd.channel.forecasts import ForecastOrder
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.loading.loading import modules
from offloadd.hosting.planning.forecast import forecast
from offloadd.hosting.running.arguments import prepare_call

TYPES = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}
LIBRARIES = {"unet": diffusers, "vae": diffusers, "text_encoder": transformers}


def with_packs(on: DeviceHost) -> DeviceHost:
    """The host, with the packs of all of these tests: a process that writes one takes seconds."""
    on._cache = device_host()._cache
    return on


PLACES: dict[str, tuple[Callable[[], DeviceHost], str]] = {
    "in place": (device_host, "none"),
    "resident": (lambda: with_packs(new_device_host(simulated_device())), "none"),
    "streamed": (lambda: with_packs(new_device_host(simulated_device())), "sequential"),
    "from disk": (lambda: with_packs(host_without_room()), "sequential"),
}


def plain_quantised(
    directory: Path,
    kind: str,
    components: tuple[str, ...] = ("unet",),
    skip: list[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A pipeline as a plain script quantises it."""
    mapping = {
        name: LIBRARIES[name].TorchAoConfig(
            TYPES[kind](set_inductor_config=False), modules_to_not_convert=skip
        )
        for name in components
    }
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        directory,
        dtype=dtype,
        quantization_config=diffusers.PipelineQuantizationConfig(quant_mapping=mapping),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(pipeline: Any, directory: Path) -> Drawn:
    noise = torch.Generator("cpu").manual_seed(SEED)
    images: Drawn = pipeline(generator=noise, **call_arguments(directory)).images
    return images


@cache
def expected(directory: Path, kind: str, components: tuple[str, ...] = ("unet",)) -> Drawn:
    return picture(plain_quantised(directory, kind, components), directory)


@pytest.mark.parametrize(
    ("place", "kind"), [*((place, "int8") for place in PLACES), ("streamed", "float8")]
)
def test_a_picture_from_quantised_weights_is_that_of_the_plain_script(
    sd_directory: Path, references: dict[Path, Drawn], place: str, kind: str
) -> None:
    make_host, mode = PLACES[place]
    on = make_host()
    model = host(sd_directory, on=on, components={"unet": {"mode": mode, "quantization": kind}})
    assert np.abs(expected(sd_directory, kind) - references[sd_directory]).max() > 1e-5
    for _ in range(3):
        np.testing.assert_array_equal(draw(model), expected(sd_directory, kind))
    assert model.unload() == []


@pytest.mark.parametrize("share", ["30%", "60%"])
def test_within_any_budget_a_whole_quantised_model_draws_the_same(
    sd_directory: Path, share: str
) -> None:
    on = with_packs(new_device_host(simulated_device()))
    whole = host(sd_directory, on=on, offload={"mode": "none", "quantization": "int8"})
    budget = int(sum(one.bytes for one in whole.components()) * int(share[:-1]) / 100)
    whole.unload()
    model = host(
        sd_directory,
        on=on,
        offload={"mode": "stream", "quantization": "int8"},
        device_budget=budget,
    )
    there = expected(sd_directory, "int8", ("unet", "vae", "text_encoder"))
    for _ in range(2):
        np.testing.assert_array_equal(draw(model), there)
    assert model.moved_bytes > 0
    assert model.unload() == []


def test_what_is_kept_of_a_linear_layer_is_a_byte_for_each_weight(sd_directory: Path) -> None:
    sizes = {}
    for quantised in (False, True):
        settings = {"quantization": "int8"} if quantised else {}
        model = host(sd_directory, components={"unet": {"mode": "none", **settings}})
        sizes[quantised] = {one.name: one.bytes for one in model.components()}["unet"]
        model.unload()
    unet = diffusers.UNet2DConditionModel.from_pretrained(sd_directory / "unet")
    layers = [one for one in unet.modules() if isinstance(one, torch.nn.Linear)]
    saved = sum(one.weight.numel() * 3 for one in layers)
    scales = sum(one.out_features * 5 + 2 * 256 for one in layers)
    assert saved - scales <= sizes[False] - sizes[True] <= saved


def test_skipped_modules_are_left_alone_and_a_model_keeps_the_dtype_that_it_computes_in(
    sd_directory: Path,
) -> None:
    skip = ["attn1", "time_embedding"]
    quantization = {"type": "int8", "skip": skip}
    model = host(
        sd_directory,
        dtype="bfloat16",
        components={"unet": {"mode": "sequential", "quantization": quantization}},
        device_budget="60%",
    )
    pipeline = plain_quantised(sd_directory, "int8", skip=skip, dtype=torch.bfloat16)
    assert modules(model._pipeline)["unet"].dtype == pipeline.unet.dtype == torch.bfloat16
    np.testing.assert_array_equal(draw(model), picture(pipeline, sd_directory))
    whole = plain_quantised(sd_directory, "int8", dtype=torch.bfloat16)
    assert np.abs(picture(pipeline, sd_directory) - picture(whole, sd_directory)).max() > 0
    assert model.unload() == []


@pytest.fixture(scope="module")
def saved_quantised(sd_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose U-Net and text encoder were saved quantised."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    shutil.copytree(sd_directory, directory)
    pipeline = plain_quantised(sd_directory, "int8", ("unet", "text_encoder"))
    for name in ("unet", "text_encoder"):
        shutil.rmtree(directory / name)
        getattr(pipeline, name).save_pretrained(directory / name)
    return directory


def test_weights_that_were_saved_quantised_are_hosted_as_they_are(
    saved_quantised: Path, sd_directory: Path
) -> None:
    for mode in ("none", "sequential"):
        model = host(
            saved_quantised,
            on=with_packs(new_device_host(simulated_device())),
            dtype="float32",
            offload=mode,
        )
        there = expected(sd_directory, "int8", ("unet", "text_encoder"))
        np.testing.assert_array_equal(draw(model), there)
        assert model.unload() == []


@pytest.mark.parametrize(
    "settings", [{"quantization": "int8"}, {"storage_dtype": "float8_e4m3fn"}], ids=str
)
def test_weights_that_were_saved_quantised_take_no_other_storage(
    saved_quantised: Path, settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="was saved with quantised weights") as refused:
        host(saved_quantised, components={"unet": {"mode": "none", **settings}})
    assert refused.value.details["component"] == "unet"


def test_quantised_bytes_are_foretold(sd_directory: Path) -> None:
    options: dict[str, Any] = {"offload": {"mode": "none", "quantization": "int8"}}
    told = forecast(
        ForecastOrder(
            spec=model_spec("plan", str(sd_directory), options),
            on_cpu=True,
            device_bytes=1 << 26,
            free_bytes=1 << 26,
        )
    )
    model = host(sd_directory, **options)
    found = {one.name: one for one in model.components() if one.bytes}
    for part in told.components:
        assert part.host_bytes == pytest.approx(found[part.name].host_bytes, rel=0.05)
        assert model.description.component_bytes[part.name] == found[part.name].bytes
    model.unload()


def test_models_that_quantise_the_same_files_in_two_ways_keep_their_packs(
    sd_directory: Path,
) -> None:
    def packs() -> dict[str, int]:
        found = device_host()._cache.glob("*.safetensors")
        return {path.name: path.stat().st_mtime_ns for path in found}

    def load(kind: str) -> None:
        host(sd_directory, components={"unet": {"quantization": kind}}).unload()

    load("int8")
    load("float8")
    before = packs()
    load("int8")
    assert packs() == before


def test_adapters_work_beside_quantised_weights_as_in_a_plain_script(
    sd_directory: Path, tmp_path: Path
) -> None:
    file = save_adapter(
        tmp_path / "ink.safetensors", sd_adapter(sd_directory, 1, ATTENTION, encoder=False)
    )
    model = host(
        sd_directory,
        on=with_packs(new_device_host(simulated_device())),
        components={"unet": {"mode": "sequential", "quantization": "int8"}},
        adapters=[{"name": "ink", "source": str(file)}],
    )
    description = model.description
    call = prepare_call(
        call_arguments(sd_directory), description.parameters, SEED, model.device, torch.float32
    )
    drawn = model.run(
        call,
        lambda step, steps: None,
        lambda: None,
        adapters=[AdapterChoice(name="ink", weight=1.0)],
    )["images"]
    pipeline = plain_quantised(sd_directory, "int8")
    pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name="ink")
    np.testing.assert_array_equal(drawn, picture(pipeline, sd_directory))
    assert np.abs(drawn - expected(sd_directory, "int8")).max() > 1e-4
    np.testing.assert_array_equal(draw(model), expected(sd_directory, "int8"))
    with pytest.raises(InvalidRequest, match="is quantised, and adapters cannot be fused"):
        model._host.engine.fuse(model._placement.hosted["unet"], ["adapter_ink"])
    np.testing.assert_array_equal(draw(model), expected(sd_directory, "int8"))
    model.unload()


def test_adapters_are_taken_for_weights_that_were_saved_quantised(
    saved_quantised: Path, sd_directory: Path, tmp_path: Path
) -> None:
    file = save_adapter(
        tmp_path / "ink.safetensors", sd_adapter(sd_directory, 1, ATTENTION, encoder=False)
    )
    model = host(saved_quantised, dtype="float32", adapters=[{"name": "ink", "source": str(file)}])
    description = model.description
    call = prepare_call(
        call_arguments(sd_directory), description.parameters, SEED, model.device, torch.float32
    )
    chosen = [AdapterChoice(name="ink", weight=1.0)]
    drawn = model.run(call, lambda step, steps: None, lambda: None, adapters=chosen)["images"]
    bare = expected(sd_directory, "int8", ("unet", "text_encoder"))
    assert np.abs(drawn - bare).max() > 1e-4
    model.unload()


def test_a_component_without_linear_layers_is_refused_by_name_and_else_left_as_it_is(
    sd_directory: Path, tmp_path: Path
) -> None:
    quantization = {"type": "int8", "skip": ["attentions", "mid_block"]}
    with pytest.raises(InvalidRequest, match="no linear layers") as refused:
        host(sd_directory, components={"vae": {"mode": "none", "quantization": quantization}})
    assert refused.value.details["component"] == "vae"
    whole = {"type": "int8", "skip": ["attentions", "mid_block", "text_model", "unet"]}
    model = host(sd_directory, offload={"mode": "none", "quantization": whole})
    assert not hasattr(modules(model._pipeline)["vae"], "hf_quantizer")
    assert draw(model).shape
    assert model.unload() == []


@pytest.mark.parametrize(
    ("offload", "named"),
    [
        ({"quantization": "int3"}, "int3"),
        ({"quantization": {"type": "int8", "leave": []}}, "leave"),
        ({"quantization": "int8", "storage_dtype": "float8_e5m2"}, "storage_dtype"),
    ],
)
def test_settings_of_quantization_are_checked_when_the_model_is_known(
    offload: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        model_spec("tiny", "/model", {"offload": {"mode": "none", **offload}})


def test_without_the_library_the_refusal_says_what_to_install(
    sd_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        "offloadd.hosting.quantization.library.find_spec",
        lambda name: None if name == "torchao" else there(name),
    )
    with pytest.raises(ModelLoadFailed, match="torchao") as refused:
        host(sd_directory, components={"unet": {"mode": "none", "quantization": "int8"}})
    assert "offloadd[quantization]" in refused.value.hint
