"""What a pipeline needs of a model on the hub is brought into the cache; failures have codes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hosting.hosting_help import draw, host, plain_script
from hosting.hub_server import Hub, running_hub
from hosting.tiny_pipelines import save_sd

from offload_protocol.errors import ErrorCode
from offload_protocol.records import ErrorInfo
from offloadd.channel.downloads import DownloadNews, DownloadOrder, Wanted
from offloadd.store.index.hub_cache import find_source
from offloadd.store.index.hub_files import needed_files

NAME = "some-one/tiny.sd"
CHUNK_BYTES = 10 * 1024 * 1024
UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has beside what is needed what is not."""
    directory = save_sd(tmp_path_factory.mktemp("model"))
    (directory / "README.md").write_text("words")
    (directory / "whole.safetensors").write_bytes(b"the same in one file")
    (directory / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "unet" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"a variant")
    (directory / "text_encoder" / "model.onnx").write_bytes(b"a graph")
    return directory


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with running_hub({NAME: model}) as hub:
        yield hub


def downloaded(
    hub: Hub, home: Path, name: str = NAME, environment: dict[str, str] | None = None, **more: Any
) -> list[DownloadNews]:
    """Everything that the process says."""
    wanted = Wanted(repository=name, **more)
    ended = subprocess.run(
        [sys.executable, "-m", "offloadd.hosting.sources.hub_download"],
        input=msgspec.json.encode(DownloadOrder(wanted=[wanted])),
        capture_output=True,
        check=True,
        env={
            **os.environ,
            "HF_HOME": str(home),
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            **(environment or {}),
        },
    )
    return [msgspec.json.decode(line, type=DownloadNews) for line in ended.stdout.splitlines()]


def refusal(news: list[DownloadNews]) -> ErrorInfo:
    error = news[-1].error
    assert error is not None
    assert error.hint
    return error


def test_exactly_what_the_pipeline_needs_is_brought_and_hosted(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = downloaded(hub, tmp_path)
    assert news[-1].is_whole
    told = [one for one in news if one.total_bytes]
    assert told
    assert 0 <= told[0].done_bytes <= told[0].total_bytes
    unwanted = {"README.md", "whole.safetensors", "text_encoder/model.onnx"}
    unwanted |= {f"unet/diffusion_pytorch_model{end}" for end in (".bin", ".fp16.safetensors")}
    assert hub.given == hub.files(NAME).keys() - unwanted
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    hosted = host(Path(NAME))
    np.testing.assert_array_equal(draw(hosted), plain_script(model))
    assert hosted.unload() == []
    asked = len(hub.asked)
    assert downloaded(hub, tmp_path)[-1].is_whole
    assert not [path for method, path in hub.asked[asked:] if (method, UNET) == ("GET", path)]


def test_a_download_that_broke_off_goes_on_from_there(tmp_path: Path) -> None:
    model, home = tmp_path / "model", tmp_path / "home"
    (model / "unet").mkdir(parents=True)
    (model / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"]}')
    # The hub's library writes pieces of 10 MiB.
    (model / UNET).write_bytes(random.Random(0).randbytes(2 * CHUNK_BYTES + 5))
    with running_hub({NAME: model}) as hub:
        hub.broken_after = CHUNK_BYTES + 5000
        error = refusal(downloaded(hub, home))
        assert error.code == ErrorCode.MODEL_LOAD_FAILED
        assert "goes on" in error.hint
        hub.broken_after = None
        hub.ranges.clear()
        assert downloaded(hub, home)[-1].is_whole
        assert hub.ranges == {UNET: f"bytes={CHUNK_BYTES}-"}
    found = find_source(NAME, cache_directory=home / "hub")
    assert (found / UNET).read_bytes() == (model / UNET).read_bytes()


def test_files_that_came_whole_before_it_broke_off_are_not_counted_as_missing(
    hub: Hub, tmp_path: Path
) -> None:
    """They are linked when the last one is there; until then the disk has to hold them once."""
    assert downloaded(hub, tmp_path)[-1].is_whole
    for link in (tmp_path / "hub").glob("models--*/snapshots/*"):
        shutil.rmtree(link)
    news = downloaded(hub, tmp_path)
    assert news[-1].is_whole
    first = next(one for one in news if one.total_bytes)
    assert first.done_bytes == first.total_bytes


def test_configurations_alone_are_brought_for_a_single_file(hub: Hub, tmp_path: Path) -> None:
    assert downloaded(hub, tmp_path, with_weights=False)[-1].is_whole
    found = find_source(NAME, cache_directory=tmp_path / "hub")
    assert (found / "unet" / "config.json").is_file()
    assert not list(found.rglob("*.safetensors"))


def test_what_cannot_be_downloaded_says_why(hub: Hub, tmp_path: Path) -> None:
    cases = [
        (downloaded(hub, tmp_path, "some-one/other"), "is not on the hub", "HF_TOKEN"),
        (downloaded(hub, tmp_path, revision="v9"), "in this revision", "branch"),
        (
            downloaded(hub, tmp_path, environment={"HF_HUB_OFFLINE": "1"}),
            "HF_HUB_OFFLINE forbids",
            "unset",
        ),
        (
            downloaded(hub, tmp_path, environment={"HF_ENDPOINT": "http://127.0.0.1:9"}),
            "cannot be downloaded from http://127.0.0.1:9",
            "hosting.download",
        ),
    ]
    hub.gated.add(NAME)
    cases.append((downloaded(hub, tmp_path), "granted", "HF_TOKEN"))
    hub.gated.clear()
    (hub.models[NAME] / "model_index.json").rename(tmp_path / "kept")
    try:
        cases.append((downloaded(hub, tmp_path), "is no diffusers pipeline", "config"))
    finally:
        shutil.move(tmp_path / "kept", hub.models[NAME] / "model_index.json")
    for news, problem, hint in cases:
        error = refusal(news)
        assert error.code == ErrorCode.MODEL_LOAD_FAILED
        assert problem in error.message
        assert hint in error.hint


def test_a_disk_that_cannot_take_it_is_named(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "a file"
    home.write_text("no directory")
    error = refusal(downloaded(hub, home))
    assert error.code == ErrorCode.STORAGE_FAILED
    assert str(home) in error.message


INDEX = {
    "_class_name": "P",
    "unet": ["diffusers", "UNet2DConditionModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "safety_checker": [None, None],
    "scale": 2,
}
STEM = "unet/diffusion_pytorch_model"


@pytest.mark.parametrize(
    ("there", "options", "chosen"),
    [
        (["a.safetensors", f"{STEM}.safetensors"], {}, [f"{STEM}.safetensors"]),
        (
            [f"{STEM}.safetensors", f"{STEM}.fp16.safetensors"],
            {"variant": "fp16"},
            [f"{STEM}.fp16.safetensors"],
        ),
        (
            [
                f"{STEM}.safetensors.index.json",
                *(f"{STEM}-0000{number}-of-00002.safetensors" for number in (1, 2)),
                f"{STEM}.safetensors.index.fp16.json",
                *(f"{STEM}.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)),
            ],
            {"variant": "fp16"},
            [
                *(f"{STEM}.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)),
                f"{STEM}.safetensors.index.fp16.json",
            ],
        ),
        ([f"{STEM}.bin"], {}, []),
        ([f"{STEM}.bin"], {"pickles": True}, [f"{STEM}.bin"]),
        ([f"{STEM}.safetensors"], {"without": ["unet"]}, []),
        (["unet/../../x.safetensors", "safety_checker/model.safetensors"], {}, []),
    ],
)
def test_one_form_of_the_weights_is_chosen(
    there: list[str], options: dict[str, Any], chosen: list[str]
) -> None:
    always = ["model_index.json", "tokenizer/vocab.json", "unet/config.json"]
    found = needed_files(INDEX, [*always, "unet/code.py", *there], **options)
    assert found == sorted(always + chosen)
