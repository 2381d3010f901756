"""A pipeline is weighed component by component without loading it, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from store.checkpoints import arrays, write_file, write_shards

from offload_protocol.errors import ModelLoadFailed
from offloadd.store.index import inspect_pipeline

INDEX: dict[str, Any] = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.42.1",
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    for name in ("scheduler", "text_encoder", "tokenizer", "unet"):
        (tmp_path / name).mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps(INDEX))
    for name in ("text_encoder", "unet"):
        (tmp_path / name / "config.json").write_text("{}")
    # Some tokenizers come with a config.json; that does not make them modules.
    (tmp_path / "tokenizer" / "config.json").write_text("{}")
    write_file(tmp_path / "text_encoder" / "model.safetensors", arrays({"e": (7, 3)}))
    write_shards(
        tmp_path / "unet",
        {"a.safetensors": arrays({"u": (5, 5)}), "b.safetensors": arrays({"v": (2,)})},
    )
    return tmp_path


def refusal(directory: Path, variant: str | None = None) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as caught:
        inspect_pipeline(directory, variant=variant)
    assert caught.value.hint
    return caught.value


def test_every_component_is_listed_with_its_bytes(pipeline: Path) -> None:
    found = inspect_pipeline(pipeline)
    assert found.class_name == "StableDiffusionPipeline"
    assert {one.name: one.size_bytes for one in found.components} == {
        "scheduler": 0,
        "text_encoder": 7 * 3 * 2,
        "tokenizer": 0,
        "unet": (25 + 2) * 2,
    }
    assert found.size_bytes == 96
    assert [one.class_name for one in found.components if one.checkpoint] == [
        "CLIPTextModel",
        "UNet2DConditionModel",
    ]


def test_a_variant_is_taken_where_it_is_and_the_plain_files_elsewhere(pipeline: Path) -> None:
    write_file(pipeline / "text_encoder" / "model.fp16.safetensors", arrays({"e": (1,)}))
    found = {
        one.name: one.checkpoint for one in inspect_pipeline(pipeline, variant="fp16").components
    }
    assert found["text_encoder"] is not None
    assert found["unet"] is not None
    assert found["text_encoder"].variant == "fp16"
    assert found["unet"].variant is None


def test_a_variant_that_no_component_has_is_refused(pipeline: Path) -> None:
    assert "no component with the variant 'fp16'" in refusal(pipeline, "fp16").message


def test_a_component_that_is_listed_but_not_there_is_named(pipeline: Path) -> None:
    (pipeline / "tokenizer" / "config.json").unlink()
    (pipeline / "tokenizer").rmdir()
    assert "lists 'tokenizer' (CLIPTokenizer)" in refusal(pipeline).message


def test_a_module_without_weights_is_refused(pipeline: Path) -> None:
    (pipeline / "text_encoder" / "model.safetensors").unlink()
    error = refusal(pipeline)
    assert str(pipeline / "text_encoder") in error.message
    assert "no safetensors weights" in error.message


def test_case_24_a_module_with_pickles_only_is_refused(pipeline: Path) -> None:
    path = pipeline / "text_encoder" / "model.safetensors"
    path.rename(path.with_name("pytorch_model.bin"))
    error = refusal(pipeline)
    assert "pytorch_model.bin" in error.message
    assert error.details["kind"] == "pickle"


def test_what_is_no_pipeline_says_why(pipeline: Path) -> None:
    assert "has no model_index.json" in refusal(pipeline / "unet").message
    assert "is not a directory" in refusal(pipeline / "nowhere").message
    (pipeline / "model_index.json").write_text('{"unet": ["diffusers", "X"]}')
    assert "names no pipeline class" in refusal(pipeline).message
    (pipeline / "model_index.json").write_text("{'python': 1}")
    assert "is no sound pipeline index" in refusal(pipeline).message


def test_a_component_name_cannot_leave_the_directory(pipeline: Path) -> None:
    index = INDEX | {"../unet": ["diffusers", "UNet2DConditionModel"]}
    (pipeline / "model_index.json").write_text(json.dumps(index))
    assert refusal(pipeline).details["kind"] == "unsafe_reference"


def test_inspecting_imports_neither_torch_nor_numpy(pipeline: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from offloadd.store.index import inspect_pipeline\n"
        "print(inspect_pipeline(pathlib.Path(sys.argv[1])).size_bytes)\n"
        "print(sorted({'torch', 'numpy', 'safetensors', 'diffusers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(pipeline)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["96", "[]"]
