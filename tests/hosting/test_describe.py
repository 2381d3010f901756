"""A model is described from headers and signatures; a bad one is refused before it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hosting.hosting_help import host
from hosting.tiny_pipelines import save_sd
from safetensors.torch import load_file, save_file

from offload_protocol.errors import InvalidRequest, ModelLoadFailed, OffloadError
from offloadd.channel.checked_specs import model_spec
from offloadd.hosting.sources.describe import Description, describe
from offloadd.hosting.sources.sources import source_directory

UNET = "unet/diffusion_pytorch_model.safetensors"


def described(source: Path | str, *, on_cpu: bool = True, **options: Any) -> Description:
    return describe(model_spec("tiny", str(source), options), on_cpu)


@pytest.fixture
def copied(sd_directory: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(sd_directory, directory)
    return directory


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_components_carry_their_class_and_bytes(sd_directory: Path) -> None:
    message = described(sd_directory).message()
    assert message.pipeline == "StableDiffusionPipeline"
    assert message.dtype == "float32"
    kinds = {one.name: one.kind for one in message.components}
    assert kinds["unet"] == "UNet2DConditionModel"
    assert kinds["scheduler"] == "DDIMScheduler"
    stored = sum(one.nbytes for one in load_file(sd_directory / UNET).values())
    assert {one.name: one.bytes for one in message.components}["unet"] == stored


def test_parameters_are_those_of_the_call_without_code(sd_directory: Path) -> None:
    parameters = {one.name: one for one in described(sd_directory).message().parameters}
    assert parameters["prompt"].kinds == ["str", "list", "none"]
    assert parameters["num_inference_steps"].kinds == ["int"]
    for name in ("self", "generator", "callback_on_step_end", "return_dict", "kwargs"):
        assert name not in parameters


@pytest.mark.parametrize(
    ("fixture", "multiple"), [("sd_directory", 8), ("flux_directory", 8)], ids=["sd", "flux"]
)
def test_sizes_are_multiples_of_what_the_pipeline_demands(
    request: pytest.FixtureRequest, fixture: str, multiple: int
) -> None:
    assert described(request.getfixturevalue(fixture)).size_multiple == multiple


def test_a_deeper_autoencoder_asks_for_larger_multiples(copied: Path) -> None:
    edit_json(copied / "vae/config.json", block_out_channels=[8] * 5)
    assert described(copied).size_multiple == 16


@pytest.mark.parametrize(
    ("stored", "wanted", "on_cpu", "dtype"),
    [
        (torch.float16, "auto", True, torch.float32),
        (torch.float16, "auto", False, torch.float16),
        (torch.float16, "float16", True, torch.float16),
        (torch.bfloat16, "auto", True, torch.bfloat16),
        (torch.float32, "bfloat16", True, torch.bfloat16),
    ],
)
def test_the_dtype_follows_the_files_the_wish_and_the_device(
    tmp_path: Path, stored: torch.dtype, wanted: str, on_cpu: bool, dtype: torch.dtype
) -> None:
    source = save_sd(tmp_path / "model", dtype=stored)
    description = described(source, on_cpu=on_cpu, dtype=wanted)
    assert description.dtype == dtype
    on_file = sum(one.nbytes for one in load_file(source / UNET).values())
    assert description.component_bytes["unet"] == on_file * dtype.itemsize // stored.itemsize


def test_a_model_stored_in_float16_is_loaded_in_float32_on_a_cpu(tmp_path: Path) -> None:
    model = host(save_sd(tmp_path / "model", dtype=torch.float16))
    assert model.resident_bytes == sum(model.description.component_bytes.values())


def no_component(directory: Path) -> None:
    shutil.rmtree(directory / "vae")


def no_weights(directory: Path) -> None:
    (directory / UNET).unlink()


def cut_weights(directory: Path) -> None:
    with (directory / UNET).open("r+b") as file:
        file.truncate(5000)


def empty_weights(directory: Path) -> None:
    (directory / UNET).write_bytes(b"")


def no_index(directory: Path) -> None:
    (directory / "model_index.json").unlink()


def custom_pipeline(directory: Path) -> None:
    edit_json(directory / "model_index.json", _class_name=["pipeline_mine", "MyPipeline"])
    (directory / "pipeline_mine.py").write_text("raise SystemExit('this code ran')")


def custom_component(directory: Path) -> None:
    edit_json(directory / "model_index.json", unet=["unet_mine", "MyUNet"])
    (directory / "unet/unet_mine.py").write_text("raise SystemExit('this code ran')")


def class_of_another_package(directory: Path) -> None:
    edit_json(directory / "model_index.json", unet=["torch", "Tensor"])


def function_for_a_class(directory: Path) -> None:
    edit_json(directory / "model_index.json", unet=["transformers", "set_seed"])


def private_name(directory: Path) -> None:
    edit_json(directory / "model_index.json", unet=["diffusers", "_LazyModule"])


def base_class_for_a_pipeline(directory: Path) -> None:
    edit_json(directory / "model_index.json", _class_name="DiffusionPipeline")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (no_component, "vae"),
        (no_weights, "unet"),
        (cut_weights, UNET),
        (empty_weights, UNET),
        (no_index, "model_index.json"),
        (custom_pipeline, "MyPipeline"),
        (custom_component, "MyUNet"),
        (class_of_another_package, "torch.Tensor"),
        (function_for_a_class, "set_seed"),
        (private_name, "_LazyModule"),
        (base_class_for_a_pipeline, "DiffusionPipeline"),
    ],
)
def test_a_source_that_cannot_be_hosted_is_refused_by_name(
    copied: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(copied)
    with pytest.raises(ModelLoadFailed, match=named.replace(".", r"\.")) as refused:
        described(copied)
    assert refused.value.hint


def test_case_54_weights_of_a_quantiser_are_refused_before_loading(copied: Path) -> None:
    edit_json(copied / "unet/config.json", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ModelLoadFailed, match="bitsandbytes") as refused:
        described(copied)
    assert "storage_dtype" in refused.value.hint
    assert refused.value.details["component"] == "unet"


@pytest.mark.parametrize("key", ["device_map", "max_memory"])
def test_settings_for_several_devices_are_refused_with_the_reason(
    sd_directory: Path, key: str
) -> None:
    options: dict[str, Any] = {key: "balanced"}
    with pytest.raises(InvalidRequest, match="several devices") as refused:
        described(sd_directory, **options)
    assert "device_budget" in refused.value.hint


def test_what_was_chosen_of_the_files_is_told(tmp_path: Path) -> None:
    directory = save_sd(tmp_path / "model")
    plain, half = directory / UNET, directory / UNET.replace(".safetensors", ".fp16.safetensors")
    save_file(load_file(plain), half, metadata={"format": "pt"})
    chosen = {one.name: one for one in described(directory, variant="fp16").message().components}
    assert (chosen["unet"].variant, chosen["unet"].files) == ("fp16", [half.name])
    assert (chosen["vae"].variant, len(chosen["vae"].files)) == ("", 1)
    assert chosen["scheduler"].files == []


def test_a_missing_configuration_is_told_as_a_download_that_did_not_finish(copied: Path) -> None:
    (copied / "unet/config.json").unlink()
    with pytest.raises(ModelLoadFailed, match="unet") as refused:
        host(copied)
    assert "download" in refused.value.hint


def test_case_23_a_truncated_file_is_told_with_both_sizes(copied: Path) -> None:
    cut_weights(copied)
    with pytest.raises(ModelLoadFailed) as refused:
        described(copied)
    assert refused.value.details["found"] == 5000
    assert refused.value.details["expected"] > 5000


def test_case_22_a_tensor_that_no_file_holds_is_refused_by_name(copied: Path) -> None:
    tensors = load_file(copied / UNET)
    del tensors["conv_out.bias"]
    save_file(tensors, copied / UNET, metadata={"format": "pt"})
    with pytest.raises(ModelLoadFailed, match=r"conv_out\.bias") as refused:
        host(copied)
    assert refused.value.details["missing"] == ["conv_out.bias"]


def test_a_transformers_tensor_that_no_file_holds_is_refused_by_name(copied: Path) -> None:
    path = copied / "text_encoder/model.safetensors"
    tensors = load_file(path)
    name = next(key for key in tensors if key.endswith("final_layer_norm.bias"))
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadFailed, match="final_layer_norm"):
        host(copied)


def test_a_configuration_that_does_not_fit_the_weights_is_refused(copied: Path) -> None:
    edit_json(copied / "unet/config.json", block_out_channels=[8, 16])
    with pytest.raises(ModelLoadFailed, match="unet"):
        host(copied)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"components": {"tokenizer": "model"}}, "tokenizer"),
        ({"components": {"transformer": "model"}}, "transformer"),
        ({"offload": {"mode": "group", "offload_to_disk_path": "here"}}, "offload_to_disk_path"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_loading(
    sd_directory: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named) as refused:
        described(sd_directory, **options)
    assert refused.value.hint


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_leaves_nothing_to_choose_is_taken_and_said(
    sd_directory: Path, on_cpu: bool, caplog: pytest.LogCaptureFixture
) -> None:
    offload = {"mode": "group", "use_stream": True, "record_stream": True}
    message = described(sd_directory, on_cpu=on_cpu, components={"vae": offload}).message()
    assert len(message.notes) == 1
    assert message.notes[0].startswith("record_stream, use_stream of vae change nothing")
    assert message.notes[0] in caplog.text


def test_a_budget_that_is_no_size_is_refused(sd_directory: Path) -> None:
    for wrong in ("plenty", "120%", "-1"):
        with pytest.raises(InvalidRequest, match="is not a size"):
            described(sd_directory, device_budget=wrong)


def test_a_budget_may_be_a_share_of_the_device(sd_directory: Path) -> None:
    assert described(sd_directory, device_budget="25%").budget_bytes(1000) == 250
    assert described(sd_directory, device_budget="1KiB").budget_bytes(1000) == 1024
    assert described(sd_directory).budget_bytes(1000) is None


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("builtin:../secrets", ModelLoadFailed),
        ("builtin:nothing", ModelLoadFailed),
        ("./model", InvalidRequest),
        ("~/model", InvalidRequest),
        ("/no/such/model", ModelLoadFailed),
        ("someone/not-downloaded", ModelLoadFailed),
    ],
)
def test_sources_that_are_not_there_are_refused(source: str, error: type[OffloadError]) -> None:
    with pytest.raises(error) as refused:
        described(source)
    assert refused.value.hint


def test_a_model_of_the_hub_cache_is_found_by_its_name(
    sd_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0" * 40
    entry = tmp_path / "models--someone--tiny"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs/main").write_text(commit)
    (entry / "snapshots").mkdir()
    (entry / "snapshots" / commit).symlink_to(sd_directory)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert source_directory("someone/tiny") == entry / "snapshots" / commit
    assert described("someone/tiny").files.class_name == "StableDiffusionPipeline"
