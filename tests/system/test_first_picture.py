"""From a client process through the daemon to a picture that shows what the prompt said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from system.daemons import Daemon, running_daemon

from judge_shapes import judge, parse_prompt
from offload_client import Progress
from offload_protocol.errors import Unreachable

pytestmark = pytest.mark.system

PROMPT = "a red circle on a white background"
DRAW = """
import sys
from offload_client import Client
endpoint, prompt, seed, file = sys.argv[1:]
with Client(endpoint) as client:
    client.generate("shapes", prompt=prompt, seed=int(seed)).image.save(file)
"""


def first_stats(daemon: Daemon, deadline: float) -> dict[str, Any]:
    """The answer to the first request that the new daemon takes."""
    while True:
        try:
            with daemon.client() as client:
                stats: dict[str, Any] = client.stats()
                return stats
        except Unreachable:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def fits(file: Path, prompt: str) -> bool:
    return judge(Image.open(file), parse_prompt(prompt)).fits


def test_two_client_processes_at_once_both_get_their_own_right_picture(
    daemon: Daemon, tmp_path: Path
) -> None:
    prompts = [PROMPT, "a blue square on a yellow background"]
    files = [tmp_path / f"{index}.png" for index in range(2)]
    clients = [
        subprocess.Popen([sys.executable, "-c", DRAW, daemon.endpoint, prompt, "7", str(file)])
        for prompt, file in zip(prompts, files, strict=True)
    ]
    assert [client.wait(120) for client in clients] == [0, 0]
    assert [fits(file, prompt) for file, prompt in zip(files, prompts, strict=True)] == [True, True]


def test_the_daemon_draws_the_identical_picture_as_a_plain_diffusers_script(
    daemon: Daemon, tmp_path: Path
) -> None:
    script = """
import sys, torch
from diffusers import StableDiffusionPipeline
import offloadd.hosting
from pathlib import Path
source = Path(offloadd.hosting.__file__).parent / "shapes"
pipeline = StableDiffusionPipeline.from_pretrained(source, torch_dtype=torch.float32)
noise = torch.Generator("cpu").manual_seed(7)
picture = pipeline(sys.argv[1], generator=noise, num_inference_steps=12, guidance_scale=3.0)
picture.images[0].save(sys.argv[2])
"""
    file = tmp_path / "plain.png"
    subprocess.run([sys.executable, "-c", script, PROMPT, str(file)], check=True, timeout=120)
    with daemon.client() as client:
        result = client.generate(
            "shapes", prompt=PROMPT, seed=7, num_inference_steps=12, guidance_scale=3.0
        )
    assert result.seed == 7
    assert np.array_equal(np.asarray(result.image), np.asarray(Image.open(file)))


def test_stats_are_answered_within_a_second_of_the_start_while_the_worker_loads(
    short_tmp: Path,
) -> None:
    with running_daemon(short_tmp / "early", ready=False) as daemon:
        stats = first_stats(daemon, time.monotonic() + 30)
        # By the daemon's own clock: what a loaded machine delays before is not its doing.
        assert stats["daemon"]["uptime_s"] < 1.0
        assert stats["daemon"]["state"] == "starting"
        assert stats["workers"][0]["state"] == "starting"


def test_without_a_seed_one_is_drawn_and_reported_and_makes_the_picture_again(
    daemon: Daemon,
) -> None:
    with daemon.client() as client:
        first = client.generate("shapes", prompt=PROMPT, num_inference_steps=4)
        again = client.generate("shapes", prompt=PROMPT, num_inference_steps=4, seed=first.seed)
    assert np.array_equal(np.asarray(first.image), np.asarray(again.image))


def test_each_picture_of_a_batch_can_be_made_again_alone_from_its_seed(daemon: Daemon) -> None:
    with daemon.client() as client:
        batch = client.generate(
            "shapes", prompt=PROMPT, seed=11, num_images_per_prompt=3, num_inference_steps=4
        )
        alone = client.generate("shapes", prompt=PROMPT, seed=batch.seeds[2], num_inference_steps=4)
    assert len(batch.images) == len(batch.seeds) == 3
    # Kernels may choose another blocking for another batch size: the last bits can differ there.
    difference = np.abs(np.asarray(batch.images[2], int) - np.asarray(alone.image, int))
    assert difference.max() <= 1


def test_progress_counts_what_the_pipeline_counts(daemon: Daemon) -> None:
    seen: list[Progress] = []
    with daemon.client() as client:
        client.generate(
            "shapes", prompt=PROMPT, seed=1, num_inference_steps=5, on_progress=seen.append
        )
    assert seen[-1].step == seen[-1].steps == 5
    assert [event.step for event in seen] == sorted(event.step for event in seen)


def test_arrays_come_back_when_they_are_asked_for(daemon: Daemon) -> None:
    with daemon.client() as client:
        result = client.generate(
            "shapes", prompt=PROMPT, seed=1, num_inference_steps=2, output_type="np"
        )
    pictures = result.outputs["images"]
    assert pictures.shape == (1, 64, 64, 3)
    assert pictures.dtype == np.float32
