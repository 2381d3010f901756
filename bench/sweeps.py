"""Eight clients on one model whose weights are streamed: with shared sweeps against without.

Used by `bench/sharing.py`. On a CPU whole daemons draw the same jobs with a denoiser of 0.7 GB
that rests on disk, for few tokens, so that a step takes as long as its weights take to come; the
pictures have to be the same. On a simulated link the engine does so in virtual time, with blocks
that compute for a thirty-second part of what they take to come.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.kill_rounds import RestartedDaemon
from bench.simulated_link import KIB, LINK, Block, MemorySource, Model
from bench.wide_models import Width, wide_model

from offloadd.offload.accelerator.simulated import SimulatedAccelerator
from offloadd.offload.engine import Engine
from offloadd.offload.grouping.groups import GroupOptions, group_module
from offloadd.offload.planning.allowances import Allowance

CLIENTS = 8
GROUPS = 24
MODEL = Width(channels=640, layers=4)
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
        model = wide_model(Path(directory) / "wide", MODEL)
        alone, together = (draw(model, max_sweep, jobs_per_client) for max_sweep in (1, CLIENTS))
    return {
        "sweep_jobs_per_minute": round(together.jobs_per_minute, 1),
        "jobs_per_minute_without_sweeps": round(alone.jobs_per_minute, 1),
        "sweep_speedup": round(together.jobs_per_minute / alone.jobs_per_minute, 2),
        "sweep_identical": int(alone.pixels == together.pixels),
        "sweep_jobs": len(together.pixels),
    }


def simulated_figures() -> dict[str, Any]:
    """The engine on a simulated link: eight members, a ring of two groups, nothing resident."""
    sizes = (256 * KIB,) * GROUPS
    alone_s, alone = _on_a_link(sizes, together=False)
    together_s, drawn = _on_a_link(sizes, together=True)
    return {
        "sweep_speedup_simulated_link": round(alone_s / together_s, 2),
        "sweep_identical_simulated_link": int(all(map(torch.equal, alone, drawn))),
    }


def _on_a_link(sizes: tuple[int, ...], *, together: bool) -> tuple[float, list[torch.Tensor]]:
    """Virtual seconds for all members' steps, and what each has computed."""
    device = SimulatedAccelerator(1 << 30, LINK, random.Random(1))
    compute_s = sizes[0] / LINK.bandwidth_bytes_per_s / 32
    model = Model([Block(size, compute_s, device) for size in sizes])
    grouping = group_module(model, GroupOptions(small_limit_bytes=0))
    source = MemorySource(model, grouping.layout)
    engine = Engine(device, 1 << 29)
    allowance = Allowance(grouping.kept_bytes + 2 * sizes[0])
    engine.attach("m", model, source, GroupOptions(small_limit_bytes=0), allowance=allowance)

    def work(member: int) -> torch.Tensor:
        x = torch.full((1 + member,), float(member))
        with torch.no_grad():
            for _ in range(STEPS + member % 2):
                x = model(x)
        return x

    work(0)
    began_s = device.compute_s
    if together:
        room = engine.sweep("m")
        futures = [room.join(str(member), partial(work, member)) for member in range(CLIENTS)]
        room.run()
        drawn = [future.result() for future in futures]
    else:
        drawn = [work(member) for member in range(CLIENTS)]
    took_s = device.compute_s - began_s
    engine.close()
    return took_s, drawn


def draw(model: Path, max_sweep: int, jobs_per_client: int) -> Drawn:
    """Let every client draw its jobs on a daemon of its own setting, one after the other."""
    with tempfile.TemporaryDirectory(prefix="sweeps-") as directory:
        folder = Path(directory)
        packs = folder / "packs"
        packs.mkdir()
        (folder / "offloadd.toml").write_text(
            f'[queue]\nmax_sweep = {max_sweep}\n[hosting]\nembeddings = "0"\n'
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
