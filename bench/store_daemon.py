"""The daemon that `store` measures: started on a configuration of its own, asked and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.host_bytes import tree
from bench.store_models import CALL

from offload_client import Client
from offload_protocol.errors import OffloadError

START_S = 120.0


class MeasuredDaemon:
    """A ready daemon on this machine's CPU."""

    def __init__(self, endpoint: str, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.endpoint = endpoint
        self.client = Client(endpoint)

    @property
    def pid(self) -> int:
        return self.process.pid

    def stats(self) -> dict[str, Any]:
        return self.client.stats()

    def draw(self, model: str, steps: int = 1, **options: Any) -> Any:
        """One picture, or with `output_type="latent"` what the steps gave."""
        return self.client.generate(model, **CALL, num_inference_steps=steps, seed=7, **options)

    def store(self, key: str) -> int:
        value: int = self.stats()["store"][key]
        return value

    def parts(self, model: str) -> list[dict[str, Any]]:
        """The components of a model with their figures."""
        (found,) = (one for one in self.stats()["models"] if one["name"] == model)
        return [part for part in found["components"] if part["bytes"]]

    def settled_read_bytes(self) -> int:
        """All that was read from disk, once the workers' reports, a second late, say no more."""
        before = -1
        while (now := self.store("disk_read_bytes_total")) != before:
            before = now
            time.sleep(1.5)
        return now

    def kill_worker(self) -> None:
        """SIGKILL; returns when another worker is ready."""
        pid = self.stats()["workers"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        while True:
            worker = self.stats()["workers"][0]
            if worker["pid"] not in (pid, None) and worker["state"] == "ready":
                return
            time.sleep(0.02)


@contextmanager
def daemon(
    folder: Path, models: Mapping[str, Path], host_budget: int = 0, embeddings: str = "0"
) -> Iterator[MeasuredDaemon]:
    """A daemon that hosts these directories; 0 is the budget of whoever sets none.

    Unless `embeddings` says so, each picture computes its prompt, as in the rivals.
    """
    folder.mkdir(parents=True)
    config = folder / "offloadd.toml"
    text = f'[store]\nhost_budget = "{host_budget}"\n' if host_budget else ""
    text += f'[hosting]\nembeddings = "{embeddings}"\n'
    for name, directory in models.items():
        text += f'\n[[models]]\nname = "{name}"\nsource = "{directory}"\n'
    config.write_text(text, encoding="utf-8")
    endpoint = f"ipc://{folder}/d.sock"
    command = [sys.executable, "-m", "offloadd", "--device", "cpu", "--endpoint", endpoint]
    command += ["--config", str(config), "--state-dir", str(folder / "state")]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield _ready(endpoint, process, models)
    finally:
        below = tree(process.pid)
        process.terminate()
        process.wait(30)
        for pid in below:
            _wait_for_end(pid)


def _ready(
    endpoint: str, process: subprocess.Popen[bytes], models: Mapping[str, Path]
) -> MeasuredDaemon:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            found = MeasuredDaemon(endpoint, process)
            rows = {row["name"]: row for row in found.stats()["models"]}
            # Described, so the libraries are imported, as they are in the rivals.
            if all(rows[name]["pipeline"] for name in models):
                return found
        except OffloadError:
            if process.poll() is not None:
                raise
        time.sleep(0.1)
    raise TimeoutError(f"no daemon after {START_S} s")


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
