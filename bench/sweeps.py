"""Eight clients on one model whose weights come from disk: with shared sweeps against without.

Used by `bench/sharing.py`. The denoiser is about half a gigabyte and draws few tokens, so that a
step takes as long as its weights take to come. Both daemons draw the same jobs; the pictures have
to be the same.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from bench.kill_rounds import RestartedDaemon

from offloadd.hosting.sources import source_directory

CLIENTS = 8
STEPS = 6
PROMPT = "a red circle on a white background"
WAIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one daemon made of the jobs of all clients."""

    took_s: float
    pixels: dict[int, bytes]
    moved_bytes: int

    @property
    def jobs_per_minute(self) -> float:
        return 60 * len(self.pixels) / self.took_s


def sweep_figures(jobs_per_client: int) -> dict[str, Any]:
    """The figures of the bench."""
    with tempfile.TemporaryDirectory(prefix="sweeps-") as directory:
        model = wide_model(Path(directory) / "wide")
        alone, together = (draw(model, max_sweep, jobs_per_client) for max_sweep in (1, CLIENTS))
    return {
        "sweep_jobs_per_minute": round(together.jobs_per_minute, 1),
        "jobs_per_minute_without_sweeps": round(alone.jobs_per_minute, 1),
        "sweep_speedup": round(together.jobs_per_minute / alone.jobs_per_minute, 2),
        "sweep_identical": int(alone.pixels == together.pixels),
        "sweep_jobs": len(together.pixels),
    }


def wide_model(directory: Path) -> Path:
    """The pipeline of `shapes` with a denoiser of random weights, wide and for few tokens."""
    shutil.copytree(source_directory("builtin:shapes"), directory)
    shutil.rmtree(directory / "unet")
    torch.manual_seed(1)
    unet: Any = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(64, 768),
        layers_per_block=1,
        transformer_layers_per_block=(1, 3),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=(4, 12),
        norm_num_groups=16,
    )
    unet.save_pretrained(directory / "unet")
    return directory


def draw(model: Path, max_sweep: int, jobs_per_client: int) -> Drawn:
    """Let every client draw its jobs on a daemon of its own setting, one after the other."""
    with tempfile.TemporaryDirectory(prefix="sweeps-") as directory:
        folder = Path(directory)
        packs = folder / "packs"
        packs.mkdir()
        (folder / "offloadd.toml").write_text(
            f"[queue]\nmax_sweep = {max_sweep}\n"
            f'[[models]]\nname = "wide"\nsource = {json.dumps(str(model))}\ndtype = "float32"\n'
            '[models.components.unet]\nmode = "group"\n'
            f"offload_to_disk_path = {json.dumps(str(packs))}\n"
        )
        daemon = RestartedDaemon([sys.executable, "-m", "offloadd"], folder)
        try:
            daemon.wait_until_ready()
            with daemon.client("warm") as client:
                for number in range(3):
                    client.generate("wide", **_request(number), timeout_s=WAIT_S)
            return _drawn(daemon, jobs_per_client)
        finally:
            daemon.stop()


def _drawn(daemon: RestartedDaemon, jobs_per_client: int) -> Drawn:
    pixels: dict[int, bytes] = {}
    moved: list[int] = []

    def run(client_number: int) -> None:
        with daemon.client(f"client {client_number}") as client:
            for index in range(jobs_per_client):
                number = client_number * jobs_per_client + index
                result = client.generate("wide", **_request(number), timeout_s=WAIT_S)
                pixels[number] = result.image.tobytes()
                moved.append(result.moved_bytes)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Drawn(time.monotonic() - began_s, pixels, sum(moved))


def _request(number: int) -> dict[str, Any]:
    """Jobs in several shapes; without guidance, so that a step is one forward of one picture."""
    return {
        "prompt": PROMPT,
        "seed": number,
        "num_inference_steps": STEPS,
        "guidance_scale": 1.0,
        "height": 16 + 16 * (number % 2),
        "width": 16,
    }
