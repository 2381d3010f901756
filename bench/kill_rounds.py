"""Kills worker or daemon again and again under load, and counts what became of every job.

Promise 6, measured: each accepted job is delivered exactly once and right, and none hangs. The
moments are random, from a seed. Used by `bench/sharing.py` and by tests/system/test_no_job_lost.py.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload_client import Client
from offload_protocol.errors import OffloadError, UnknownJob

START_S = 120.0
PATIENCE_S = 300.0
"""How long a job may take, kills included, before it counts as hanging."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients ask for: `arguments` of job `n`, and whether its result is right."""

    model: str
    arguments: Callable[[int], dict[str, Any]]
    is_right: Callable[[int, Any], bool]
    clients: int = 8


@dataclass(slots=True)
class Counts:
    """What became of the jobs; `errors` says how lost ones ended."""

    accepted: int = 0
    delivered: int = 0
    duplicated: int = 0
    wrong: int = 0
    worker_kills: int = 0
    daemon_kills: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Accepted and not delivered."""
        return self.accepted - self.delivered

    def figures(self) -> dict[str, int]:
        """The keys of the bench."""
        return {
            "jobs_accepted": self.accepted,
            "jobs_lost": self.lost,
            "jobs_duplicated": self.duplicated,
            "jobs_wrong": self.wrong,
            "worker_kills": self.worker_kills,
            "daemon_kills": self.daemon_kills,
        }


class RestartedDaemon:
    """A daemon that is started again on the same state as often as it is killed."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/d.sock"
        self.log = directory / "log"
        config = directory / "offloadd.toml"
        if not config.exists():
            config.write_text("")
        self._command = [*command, "--endpoint", self.endpoint, "--device", "cpu"]
        self._command += ["--state-dir", str(directory / "state"), "--config", str(config)]
        self.start()

    def start(self) -> None:
        """Start it; returns at once."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """Kill it as the world would, without a word."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it in order."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        if self.process.poll() is None:
            self.kill()

    def client(self, program: str) -> Client:
        """A client that waits through restarts."""
        return Client(
            self.endpoint, program=program, connect_timeout_s=60, reconnect_timeout_s=PATIENCE_S
        )

    def worker_pid(self) -> int | None:
        """The worker, once one has found its device."""
        with Client(self.endpoint, connect_timeout_s=1.0) as client:
            (worker,) = client.stats()["workers"]
        pid: int | None = worker["pid"] if worker["state"] == "ready" else None
        return pid

    def wait_until_ready(self) -> int:
        """Wait for a worker; gives its process id."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            with suppress(OffloadError):
                pid = self.worker_pid()
                if pid is not None:
                    return pid
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.02)
        raise AssertionError(f"not ready after {START_S} s:\n{self.log.read_text()[-4000:]}")


class KillRounds:
    """The load of several clients on one daemon, while it or its worker is killed."""

    def __init__(self, daemon: RestartedDaemon, load: Load, seed: int) -> None:
        self.counts = Counts()
        self._daemon = daemon
        self._load = load
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ids: list[str] = []

    def run(self, rounds: int, longest_wait_s: float) -> Counts:
        """Kill `rounds` times, each up to `longest_wait_s` after the last one was mended.

        Before every other kill or so, a job is let through: a machine that takes longer to load
        the model than that would otherwise never draw anything.
        """
        self._daemon.wait_until_ready()
        threads = [
            threading.Thread(target=self._client, args=(number,), daemon=True)
            for number in range(self._load.clients)
        ]
        for thread in threads:
            thread.start()
        # As many of each, in an order of chance.
        kills = [number % 2 == 0 for number in range(rounds)]
        self._random.shuffle(kills)
        for kills_worker in kills:
            self._round(longest_wait_s, kills_worker)
        self._stop.set()
        deadline_s = time.monotonic() + PATIENCE_S
        for thread in threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
            if thread.is_alive():
                self.counts.errors.append(f"{thread.name} hangs")
        self._count_duplicates()
        return self.counts

    def _round(self, longest_wait_s: float, kills_worker: bool) -> None:
        pid = self._daemon.wait_until_ready()
        if self._random.random() < 0.5:
            self._wait_for_a_delivery()
        time.sleep(self._random.uniform(0.0, longest_wait_s))
        if kills_worker:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.counts.worker_kills += 1
        else:
            self._daemon.kill()
            self.counts.daemon_kills += 1
            self._daemon.start()

    def _wait_for_a_delivery(self) -> None:
        before, deadline_s = self.counts.delivered, time.monotonic() + PATIENCE_S
        while self.counts.delivered == before and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def _client(self, client_number: int) -> None:
        with self._daemon.client(f"client-{client_number}") as client:
            while not self._stop.is_set():
                with self._lock:
                    number = next(self._numbers)
                self._one_job(client, number)

    def _one_job(self, client: Client, number: int) -> None:
        try:
            job = client.submit(
                self._load.model,
                job_id=f"job-{number}",
                timeout_s=PATIENCE_S,
                **self._load.arguments(number),
            )
        except OffloadError as error:
            self._note(error=f"submit {number}: {error!r}")
            return
        with self._lock:
            self.counts.accepted += 1
            self._ids.append(job.id)
        try:
            result = job.result(PATIENCE_S)
        except OffloadError as error:
            self._note(error=f"result {number}: {error!r}")
            return
        with self._lock:
            self.counts.delivered += 1
            self.counts.wrong += not self._load.is_right(number, result)

    def _note(self, error: str) -> None:
        with self._lock:
            self.counts.errors.append(error)

    def _count_duplicates(self) -> None:
        """A job that was delivered can't be had again; nor does one still run that nobody awaits.

        What the last clients said as they left is given a moment to arrive.
        """
        time.sleep(0.5)
        with self._daemon.client("inspector") as client:
            unended = [row.job for row in client.jobs() if row.state in ("queued", "running")]
            self.counts.duplicated += len(unended)
            for job in self._ids[-1000:]:
                with suppress(UnknownJob):
                    client.job(job)
                    self.counts.duplicated += 1
