"""A daemon with the scripted worker in a process of its own, and what tests do with it first."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import zmq.asyncio
from control.conftest import WireClient, until

from offload_protocol.messages import Stats

DAEMON = Path(__file__).with_name("scripted_daemon.py")


class Daemon:
    """A daemon in a process of its own."""

    def __init__(self, directory: Path, endpoint: str, **environ: str) -> None:
        self.directory = directory
        self.endpoint = endpoint
        self.log = directory / "log"
        config = directory / "config.toml"
        config.write_text('[[models]]\nname = "good"\nsource = "/good"\n')
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, str(DAEMON), "--config", str(config), "--device", "cpu"),
                    *("--endpoint", endpoint, "--state-dir", str(directory / "state")),
                ],
                stderr=log,
                env={**os.environ, **environ},
            )

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 20)

    def worker_is_gone(self, pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False


async def connected(context: zmq.asyncio.Context, daemon: Daemon) -> WireClient:
    client = WireClient(context, daemon.endpoint, "session")
    await client.hello()
    return client


async def running_job(client: WireClient, prompt: str) -> int:
    """Start a job and give the worker's process id once it runs."""
    await client.submit("runs", prompt)

    async def is_running() -> bool:
        return bool((await client.ask(Stats))["queue"]["running"])

    await until(is_running)
    return int((await client.ask(Stats))["workers"][0]["pid"])
