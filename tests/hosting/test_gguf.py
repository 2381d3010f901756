"""Transformers in GGUF files move as they are stored, and draw what plain diffusers draws."""

from __future__ import annotations

import importlib.util
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import gguf
import numpy as np
import pytest
import torch
from hosting.families import FAMILIES
from hosting.hosting_help import SEED, Drawn, call_arguments, draw, host, new_device_host, run
from hosting.original_layouts import sd3_state
from hosting.test_quantization import PLACES
from hosting.tiny_adapter_files import save_adapter
from hosting.tiny_gguf import save_gguf
from offload.rig import simulated_device
from offload.tiny_adapters import lora

from offload_protocol.errors import InvalidRequest, ModelLoadFailed
from offload_protocol.messages import AdapterChoice
from offloadd.channel.checked_specs import model_spec
from offloadd.channel.forecasts import ForecastOrder
from offloadd.hosting.loading.loading import modules
from offloadd.hosting.planning.forecast import forecast
from offloadd.hosting.running.arguments import prepare_call

KINDS = [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0]


@pytest.fixture(scope="module")
def files(flux_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The transformer of `flux_directory` in files of each kind."""
    at = tmp_path_factory.mktemp("gguf")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(flux_directory)
    weights = pipeline.transformer.state_dict()
    return {kind.name: save_gguf(at / f"flux-{kind.name}.gguf", weights, kind) for kind in KINDS}


@cache
def expected(
    directory: Path,
    file: Path,
    dtype: torch.dtype = torch.float32,
    adapter: Path | None = None,
) -> Drawn:
    """What plain diffusers draws with the file."""
    transformer = diffusers.FluxTransformer2DModel.from_single_file(
        str(file),
        config=str(directory / "transformer"),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
        dtype=dtype,
    )
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        directory, transformer=transformer, dtype=dtype
    )
    pipeline.set_progress_bar_config(disable=True)
    if adapter is not None:
        pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name, adapter_name="ink")
    noise = torch.Generator("cpu").manual_seed(SEED)
    images: Drawn = pipeline(generator=noise, **call_arguments(directory)).images
    return images


def hosted_with(file: Path, **settings: Any) -> dict[str, Any]:
    return {"components": {"transformer": {"source": str(file), **settings}}}


@pytest.mark.parametrize(
    ("place", "kind"), [*((place, "Q4_0") for place in PLACES), ("streamed", "Q8_0")]
)
def test_a_picture_from_a_gguf_file_is_that_of_plain_diffusers(
    flux_directory: Path, files: dict[str, Path], place: str, kind: str
) -> None:
    make_host, mode = PLACES[place]
    on = make_host()
    model = host(flux_directory, on=on, **hosted_with(files[kind], mode=mode))
    for _ in range(3):
        np.testing.assert_array_equal(draw(model), expected(flux_directory, files[kind]))
    assert model.unload() == []


def test_a_file_in_its_authors_layout_is_taken_as_diffusers_takes_it(tmp_path: Path) -> None:
    family = FAMILIES["sd3"]
    pipeline = family.build()
    pipeline.save_pretrained(tmp_path / "model")
    file = save_gguf(tmp_path / "sd3.gguf", sd3_state(pipeline.transformer), KINDS[1])
    model = host(tmp_path / "model", **hosted_with(file, mode="none"))
    transformer = diffusers.SD3Transformer2DModel.from_single_file(
        str(file),
        config=str(tmp_path / "model" / "transformer"),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        dtype=torch.float32,
    )
    plain = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "model", transformer=transformer)
    plain.set_progress_bar_config(disable=True)
    call = family.arguments(output_type="np")
    there = plain(generator=torch.Generator("cpu").manual_seed(SEED), **call).images
    assert "GGUFLinear" in str(modules(model._pipeline)["transformer"])
    np.testing.assert_array_equal(run(model, call)["images"], there)
    assert model.unload() == []


def test_the_file_alone_is_needed_beside_the_configuration(
    flux_directory: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(flux_directory, directory)
    for weights in (directory / "transformer").glob("*.safetensors*"):
        weights.unlink()
    on = new_device_host(simulated_device())
    model = host(
        directory, on=on, dtype="bfloat16", device_budget="60%", **hosted_with(files["Q8_0"])
    )
    there = expected(flux_directory, files["Q8_0"], torch.bfloat16)
    np.testing.assert_array_equal(draw(model), there)
    assert model.unload() == []


def test_adapters_work_beside_blocks_as_in_plain_diffusers(
    flux_directory: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    pairs = lora(diffusers_module(flux_directory), ["to_q", "to_v"], seed=1)
    state = {f"transformer.{name}": one for name, one in pairs.items()}
    adapter = save_adapter(tmp_path / "ink.safetensors", state)
    model = host(
        flux_directory,
        adapters=[{"name": "ink", "source": str(adapter)}],
        **hosted_with(files["Q4_0"], mode="sequential"),
    )
    description = model.description
    call = prepare_call(
        call_arguments(flux_directory), description.parameters, SEED, model.device, torch.float32
    )
    chosen = [AdapterChoice(name="ink", weight=1.0)]
    drawn = model.run(call, lambda step, steps: None, lambda: None, adapters=chosen)["images"]
    there = expected(flux_directory, files["Q4_0"], adapter=adapter)
    np.testing.assert_array_equal(drawn, there)
    assert np.abs(there - expected(flux_directory, files["Q4_0"])).max() > 1e-4
    model.unload()


def test_blocks_are_stored_as_they_are_in_the_file_and_foretold(
    flux_directory: Path, files: dict[str, Path]
) -> None:
    options = hosted_with(files["Q4_0"], mode="none")
    model = host(flux_directory, **options)
    found = {one.name: one for one in model.components()}["transformer"]
    transformer = modules(model._pipeline)["transformer"]
    plain = sum(one.numel() * 4 for one in diffusers_module(flux_directory).parameters())
    assert found.bytes < plain / 2
    assert sum(type(one).__name__ == "GGUFLinear" for one in transformer.modules()) > 10
    told = forecast(
        ForecastOrder(
            spec=model_spec("plan", str(flux_directory), options),
            on_cpu=True,
            device_bytes=1 << 26,
            free_bytes=1 << 26,
        )
    )
    parts = {part.name: part for part in told.components}
    assert parts["transformer"].host_bytes == pytest.approx(found.host_bytes, rel=0.05)
    described = model.description.component_bytes["transformer"]
    assert described == pytest.approx(found.bytes, rel=0.05)
    model.unload()


def diffusers_module(directory: Path) -> Any:
    return diffusers.FluxTransformer2DModel.from_pretrained(directory / "transformer")


@pytest.mark.parametrize(
    "settings", [{"quantization": "int8"}, {"storage_dtype": "float8_e4m3fn"}], ids=str
)
def test_a_gguf_file_takes_no_other_storage(
    flux_directory: Path, files: dict[str, Path], settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="quantised weights"):
        host(flux_directory, **hosted_with(files["Q8_0"], mode="none", **settings))


def test_a_file_that_is_cut_short_is_refused_before_loading(
    flux_directory: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files["Q8_0"].read_bytes()[:-1000])
    with pytest.raises(ModelLoadFailed, match="cut short"):
        host(flux_directory, **hosted_with(cut))


def test_a_file_without_all_weights_is_refused_with_its_name(
    flux_directory: Path, tmp_path: Path
) -> None:
    weights = {
        name: one
        for name, one in diffusers_module(flux_directory).state_dict().items()
        if not name.startswith("proj_out")
    }
    file = save_gguf(tmp_path / "less.gguf", weights, gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(ModelLoadFailed, match=r"less\.gguf holds no FluxTransformer2DModel"):
        host(flux_directory, **hosted_with(file))


def test_without_the_library_the_refusal_says_what_to_install(
    flux_directory: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        "offloadd.hosting.quantization.gguf_files.find_spec",
        lambda name: None if name == "gguf" else there(name),
    )
    with pytest.raises(ModelLoadFailed, match="gguf, which is not installed") as refused:
        host(flux_directory, **hosted_with(files["Q8_0"]))
    assert "offloadd[quantization]" in refused.value.hint
