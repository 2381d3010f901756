"""Pictures, videos and sound of real pipelines through a real daemon, from wherever weights lie."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from hosting import tiny_image_families as families
from hosting.families import FAMILIES, Family
from hosting.hosting_help import same_values
from hosting.original_layouts import save_original, sd_state, without_weights
from hosting.tiny_pipelines import save_sd
from system.daemons import Daemon, running_daemon

from offload_client import Client

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't:DeprecationWarning"),
]
SEED = 5
STRANGE = "mö del 'two'  \"x\""


@pytest.fixture(scope="module")
def hosting_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with running_daemon(tmp_path_factory.mktemp("daemon"), environment=environment) as daemon:
        yield daemon


@pytest.fixture
def client(hosting_daemon: Daemon) -> Iterator[Client]:
    with hosting_daemon.client() as client:
        yield client


def plain_outputs(family: Family, directory: Path) -> dict[str, Any]:
    pipeline = getattr(diffusers, family.plain_class).from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator("cpu").manual_seed(SEED)
    output = pipeline(generator=noise, **family.arguments())
    return {name: value for name, value in output.items() if value is not None}


def used_bytes(client: Client) -> int:
    used: int = client.stats()["store"]["host_used_bytes"]
    return used


@pytest.mark.parametrize("name", ["ltx_image_to_video", "wan", "stable_audio"])
def test_videos_and_sound_cross_the_wire_as_plain_diffusers_gives_them(
    client: Client, tmp_path: Path, name: str
) -> None:
    family = FAMILIES[name]
    family.build().save_pretrained(tmp_path)
    options: dict[str, Any] = {"task": family.task} if family.task else {}
    client.load(name, tmp_path, **options)
    drawn = client.generate(name, seed=SEED, **family.arguments())
    expected = plain_outputs(family, tmp_path)
    assert drawn.outputs.keys() == expected.keys()
    hits = client.stats()["embeddings"]["hits_total"]
    # Its prompt is not encoded again.
    again = client.generate(name, seed=SEED, **family.arguments())
    for key, value in expected.items():
        same_values(drawn.outputs[key], value)
        same_values(again.outputs[key], value)
    client.unload(name)
    deadline = time.monotonic() + 30
    while client.stats()["embeddings"]["hits_total"] <= hits:
        # Figures come a moment late.
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_several_tasks_on_one_set_of_weights_cost_no_second_copy(
    client: Client, tmp_path: Path
) -> None:
    family = FAMILIES["sdxl_img2img"]
    family.build().save_pretrained(tmp_path)
    client.load("draw", tmp_path)
    before_bytes = used_bytes(client)
    redraw = client.load("redraw", tmp_path, task="image-to-image")
    assert redraw.pipeline == "StableDiffusionXLImg2ImgPipeline"
    assert used_bytes(client) == before_bytes
    client.unload("draw")
    drawn = client.generate("redraw", seed=SEED, **family.arguments())
    same_values(drawn.outputs["images"], plain_outputs(family, tmp_path)["images"])
    client.unload("redraw")


def test_equal_weights_under_two_paths_are_held_once_and_two_called_model_are_two(
    client: Client, tmp_path: Path
) -> None:
    first, twin = tmp_path / "one" / "model", tmp_path / STRANGE / "model"
    other = tmp_path / "other" / "model"
    save_sd(first)
    shutil.copytree(first, twin)
    save_sd(other, seed=70)
    client.load("first", first)
    one_bytes = used_bytes(client)
    client.load("twin", twin)
    assert used_bytes(client) == one_bytes
    client.load("other", other)
    assert used_bytes(client) == 2 * one_bytes
    call: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 2}
    pictures = [
        np.asarray(client.generate(name, "a cat", seed=SEED, **call).image)
        for name in ("first", "twin", "other")
    ]
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert np.abs(pictures[0].astype(int) - pictures[2]).max() > 0
    for name in ("first", "twin", "other"):
        client.unload(name)


def test_a_single_file_is_planned_and_hosted_with_its_configurations(
    hosting_daemon: Daemon, client: Client, tmp_path: Path
) -> None:
    pipeline = families.sd()
    pipeline.save_pretrained(tmp_path / "config")
    config = without_weights(tmp_path / "config")
    (tmp_path / STRANGE).mkdir()
    file = save_original(sd_state(pipeline), tmp_path / STRANGE / "m.safetensors")
    plain = diffusers.StableDiffusionPipeline.from_single_file(
        str(file), config=str(config), local_files_only=True
    )
    call: dict[str, Any] = {"prompt": "a cat", "height": 16, "width": 16, "num_inference_steps": 2}
    noise = torch.Generator("cpu").manual_seed(SEED)
    expected = plain(generator=noise, output_type="np", **call).images
    command = [sys.executable, "-m", "offloadctl", "--endpoint", hosting_daemon.endpoint, "--json"]
    named = ["--config", str(config)]
    for words in (["plan", str(file)], ["load", "single", str(file)]):
        told = subprocess.run([*command, *words, *named], capture_output=True, check=True)
        parts = {one["name"] for one in json.loads(told.stdout)["components"] if one["bytes"]}
        assert parts == {"unet", "vae", "text_encoder"}
    for _ in range(2):
        drawn = client.generate("single", seed=SEED, output_type="np", **call)
        np.testing.assert_array_equal(drawn.outputs["images"], expected)
    client.unload("single")
    refused = subprocess.run([*command, "load", "bare", str(file)], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "no configuration was named" in refused.stdout + refused.stderr
