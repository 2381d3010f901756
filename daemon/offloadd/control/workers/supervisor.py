"""Keeps one worker process alive per device, and says what became of it.

A worker that dies is replaced after a pause that doubles with each death of its own in a row; one
that keeps dying of itself makes the device `failed` until one lives. The cause of a death is its
exit code or signal and the last line it wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from offload_protocol.codec import UNREADABLE
from offload_protocol.errors import WorkerCrashed
from offloadd.channel.framing import ControlEnd, Frame
from offloadd.channel.messages import DeviceReport, ToWorker, WorkerNews
from offloadd.control.workers.deaths import Death, OomCount, death
from offloadd.control.workers.worker_output import WorkerOutput

WORKER_COMMAND = (sys.executable, "-P", "-m", "offloadd.worker")

WorkerState = Literal["starting", "ready", "restarting", "failed", "stopped"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Times of the supervision in seconds, and the deaths in a row that make a device `failed`."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0
    steady_s: float = 30.0
    """A worker that was ready this long was sound: its death is the first in a row."""
    exit_s: float = 3.0
    """How long a worker whose channel closed may take to end before it is killed."""
    deaths_until_failed: int = 3


DEFAULT_PATIENCE = Patience()


class Overseer(Protocol):
    """Who is told about a worker."""

    def on_worker_ready(self, report: DeviceReport) -> None:
        """A worker has found its device and takes orders."""

    def on_worker_news(self, news: WorkerNews, frames: list[bytearray]) -> None:
        """A worker says something."""

    def on_worker_lost(self, death: Death) -> None:
        """The worker has died."""


class Supervisor:
    """One device's worker; `command` gets `--channel-fd N --device D` appended."""

    def __init__(
        self,
        device: str,
        clock: Callable[[], float],
        directory: Path,
        environ: Mapping[str, str],
        command: Sequence[str] = WORKER_COMMAND,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        self.device = device
        self.state: WorkerState = "starting"
        self.pid: int | None = None
        self.restarts_total = 0
        self.last_cause: WorkerCrashed | None = None
        self._clock = clock
        self._directory = directory
        self._environ = environ
        self._command = tuple(command)
        self._patience = patience
        self._channel: ControlEnd | None = None
        self._ready_s: float | None = None
        self._deaths_in_a_row = 0
        self._oom_count = OomCount()
        self._stopping = asyncio.Event()

    def send(
        self, message: ToWorker, frames: Sequence[Frame] = (), descriptors: Sequence[int] = ()
    ) -> None:
        """Hand a message to the worker; without one it goes nowhere, and the loss is reported."""
        if self._channel is not None:
            self._channel.send(message, frames, descriptors)

    async def run(self, overseer: Overseer) -> None:
        """Start workers until `stop`, and tell `overseer` about them."""
        while not self._stopping.is_set():
            try:
                end = await self._one_life(overseer)
            except OSError as error:
                cause = WorkerCrashed(f"the worker process cannot be started: {error}")
                end = Death(cause, is_own_fault=True)
            if self._stopping.is_set():
                break
            self._note_death(end)
            overseer.on_worker_lost(end)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), timeout=self._pause_s())
            self.restarts_total += 1
        self.state = "stopped"

    def stop(self) -> None:
        """Close the channel, at which the worker exits; `run` ends when it has."""
        self._stopping.set()
        if self._channel is not None:
            self._channel.close()

    async def _one_life(self, overseer: Overseer) -> Death:
        ours, theirs = socket.socketpair()
        killed_before = self._oom_count.read()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--channel-fd", str(theirs.fileno()), "--device", self.device),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self._directory,
                env=worker_environment(self._environ),
                # Ctrl-C at a terminal reaches a whole process group; stopping is ours to do.
                process_group=0,
            )
        self.pid, self._ready_s = process.pid, None
        output = WorkerOutput(process.pid)
        reading = asyncio.create_task(output.follow(process.stdout))
        self._channel = ControlEnd(ours)
        if self._stopping.is_set():
            self._channel.close()
        spoke_nonsense = False
        try:
            spoke_nonsense = await self._listen(self._channel, overseer)
        finally:
            self._channel.close()
            self._channel = None
            exit_code = await self._end(process)
            with contextlib.suppress(TimeoutError):
                # A child of the worker may hold the pipe open.
                await asyncio.wait_for(reading, timeout=1.0)
            self.pid = None
        was_out_of_memory = self._oom_count.read() > killed_before
        return death(exit_code, output.last_line, spoke_nonsense, was_out_of_memory)

    async def _listen(self, channel: ControlEnd, overseer: Overseer) -> bool:
        """Take news until the channel ends; True where it was ended for what came."""

        def take(news: WorkerNews, frames: list[bytearray]) -> None:
            if self._ready_s is None and isinstance(news, DeviceReport):
                self.state, self._ready_s = "ready", self._clock()
                overseer.on_worker_ready(news)
            overseer.on_worker_news(news, frames)

        try:
            await channel.listen(take)
        except UNREADABLE as error:
            _log.error("the worker sent a message that cannot be read: %s", error)
            return True
        return False

    async def _end(self, process: asyncio.subprocess.Process) -> int:
        try:
            return await asyncio.wait_for(process.wait(), timeout=self._patience.exit_s)
        except TimeoutError:
            _log.warning("worker %d did not end by itself and is killed", process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            return await process.wait()

    def _note_death(self, end: Death) -> None:
        cause = end.error
        steady = (
            self._ready_s is not None and self._clock() - self._ready_s >= self._patience.steady_s
        )
        if steady:
            self._deaths_in_a_row = 0
        if end.is_own_fault:
            # Who is killed from outside, however often, says nothing of whether the next one lives.
            self._deaths_in_a_row += 1
        self.last_cause = cause
        failed = self._deaths_in_a_row >= self._patience.deaths_until_failed
        self.state = "failed" if failed else "restarting"
        _log.error("%s; next attempt in %.1f s", cause.message, self._pause_s())

    def _pause_s(self) -> float:
        doubled = self._patience.first_pause_s * 2.0 ** min(max(self._deaths_in_a_row - 1, 0), 30)
        return min(doubled, self._patience.longest_pause_s)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a child of the daemon is given; what systemd says is for the main process alone."""
    ours = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
    ours |= {"LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"}
    return {name: value for name, value in environ.items() if name not in ours}
