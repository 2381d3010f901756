"""A worker's death costs no reading: its successor finds the weights in memory, files or not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hosting.tiny_pipelines import save_sd
from system.daemons import Daemon, running_daemon

from offload_client import Client

pytestmark = pytest.mark.system

CALL: dict[str, Any] = {"prompt": "a cat", "seed": 3, "num_inference_steps": 2}
MODELS = ("plain", "packed")
CONFIG = """
[[models]]
name = "plain"
source = "{directory}/plain"

[[models]]
name = "packed"
source = "{directory}/packed"
dtype = "float32"
"""


def test_a_killed_workers_successor_draws_though_every_weight_file_is_gone(
    short_tmp: Path, tmp_path: Path
) -> None:
    save_sd(tmp_path / "plain")
    # Its files hold another dtype than is computed in, so that its weights come from packs.
    save_sd(tmp_path / "packed", seed=40, dtype=torch.bfloat16)
    cache = tmp_path / "cache"
    with running_daemon(
        short_tmp / "survive",
        config=CONFIG.format(directory=tmp_path),
        environment={"CACHE_DIRECTORY": str(cache)},
    ) as daemon:
        with daemon.client() as client:
            before = [draw(client, name) for name in MODELS]
            settle(client)
        hidden = hide_weights(tmp_path)
        assert any(path.is_relative_to(cache) for path in hidden)
        kill_worker(daemon)
        with daemon.client() as client:
            assert [draw(client, name) for name in MODELS] == before
            settle(client)
            parts = [part for model in client.stats()["models"] for part in model["components"]]
            assert sum(part["host_bytes"] for part in parts) > 0
            assert [part["read_bytes"] for part in parts] == [0] * len(parts)
        assert "still in memory" in daemon.log.read_text()


def test_models_that_do_not_fit_together_take_turns_in_memory(
    short_tmp: Path, tmp_path: Path
) -> None:
    save_sd(tmp_path / "plain")
    save_sd(tmp_path / "packed", seed=40)
    models = CONFIG.format(directory=tmp_path)
    with running_daemon(short_tmp / "whole", config=models) as daemon, daemon.client() as client:
        pictures = {name: draw(client, name) for name in MODELS}
        used_bytes = client.stats()["store"]["host_used_bytes"]
    # One of the two fits, and a half.
    budget_bytes = used_bytes * 3 // 4
    config = f'[store]\nhost_budget = "{budget_bytes}"\n{models}'
    with running_daemon(short_tmp / "short", config=config) as daemon, daemon.client() as client:
        for name in 2 * MODELS:
            assert draw(client, name) == pictures[name]
            stats = client.stats()
            assert 0 < stats["store"]["host_used_bytes"] <= budget_bytes
        settle(client)
        read_bytes = client.stats()["store"]["disk_read_bytes_total"]
        assert read_bytes > 1.5 * used_bytes
        client.pin("plain")
        for name in 2 * MODELS:
            assert draw(client, name) == pictures[name]
        settle(client)
        (pinned,) = (one for one in client.stats()["models"] if one["name"] == "plain")
        assert sum(part["disk_bytes"] for part in pinned["components"]) == 0
    assert "rests: others want its memory" in daemon.log.read_text()


def draw(client: Client, model: str) -> bytes:
    picture: bytes = client.generate(model, **CALL).image.tobytes()
    return picture


def settle(client: Client) -> None:
    """Wait until what was read is in the figures, which come a second late."""
    before, deadline = -1, time.monotonic() + 30
    while (now := client.stats()["store"]["disk_read_bytes_total"]) != before:
        assert time.monotonic() < deadline
        before = now
        time.sleep(1.5)


def hide_weights(directory: Path) -> list[Path]:
    found = sorted(directory.rglob("*.safetensors"))
    for path in found:
        path.rename(path.with_suffix(".hidden"))
    return found


def kill_worker(daemon: Daemon) -> None:
    pid = daemon.worker_pid()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    with daemon.client() as client:
        while client.stats()["workers"][0]["pid"] in (pid, None):
            assert time.monotonic() < deadline
            time.sleep(0.05)
