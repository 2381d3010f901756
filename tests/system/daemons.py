"""Starts real daemons as a user would, and ends them by their pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_client import Client
from offload_protocol.errors import OffloadError

START_S = 90.0


@dataclass
class Daemon:
    """A running `offloadd`; `log` holds what it and its workers wrote to standard error."""

    endpoint: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, **options: Any) -> Client:
        """A new client of this daemon."""
        return Client(self.endpoint, **options)

    def worker_pid(self) -> int:
        """The process that owns the device now."""
        with self.client() as client:
            pid: int = client.stats()["workers"][0]["pid"]
            return pid

    def wait_until_ready(self, timeout_s: float = START_S) -> None:
        """Wait until a worker has found its device."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with self.client() as client:
                    if client.stats()["daemon"]["state"] == "ready":
                        return
            except OffloadError:
                assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.log.read_text()}")

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 15.0) -> int:
        """Ask the daemon to end and give its exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


@contextmanager
def running_daemon(
    directory: Path,
    *arguments: str,
    config: str = "",
    environment: Mapping[str, str] | None = None,
    ready: bool = True,
) -> Iterator[Daemon]:
    """A daemon with its socket, state and configuration in `directory`; ended when left."""
    directory.mkdir(parents=True, exist_ok=True)
    config_file = directory / "offloadd.toml"
    config_file.write_text(config)
    endpoint = f"ipc://{directory}/offloadd.sock"
    log = directory / "log"
    command = [sys.executable, "-m", "offloadd", "--endpoint", endpoint, "--device", "cpu"]
    command += ["--config", str(config_file), "--state-dir", str(directory / "state"), *arguments]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
        )
    daemon = Daemon(endpoint, process, log)
    try:
        if ready:
            daemon.wait_until_ready()
        yield daemon
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
