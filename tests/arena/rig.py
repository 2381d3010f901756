"""A control plane's host memory and workers' clients, joined by real channels."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from offloadd.channel.framing import ChannelClosed, ControlEnd, WorkerEnd
from offloadd.control.memory.inheritance import DescriptorStore, Inheritance
from offloadd.control.memory.memory import HostMemory
from offloadd.store.arena.client import ArenaClient
from offloadd.store.arena.keeper import Pin
from offloadd.store.reader import DiskReader

PIECE_BYTES = 64 * 1024
SCRIPT = Path(__file__).parent / "arena_worker.py"
TESTS = SCRIPT.parents[1]


def _search_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class LocalWorker:
    """A client in this process, with a channel of its own."""

    def __init__(self, reader: DiskReader, channel: socket.socket, pin: Pin | None) -> None:
        self.reader = reader
        self.end = WorkerEnd(channel)
        self.arena = ArenaClient(reader, self.end.send, piece_bytes=PIECE_BYTES)
        if pin is not None:
            self.arena.use_pin(pin)
        self.thread = threading.Thread(target=self._receive, daemon=True)
        self.thread.start()

    def _receive(self) -> None:
        try:
            while True:
                message, _, descriptors = self.end.receive_all()
                self.arena.handle(message, descriptors)  # type: ignore[arg-type]
        except ChannelClosed:
            self.end.close()

    def stop(self) -> None:
        self.thread.join()
        self.arena.close()
        self.reader.close()


class ProcessWorker:
    """A client in a process of its own, which can be killed; it does what `arena_worker` says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, do: str, **fields: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        answer = json.loads(await self.process.stdout.readline())
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["error"])
        return answer

    async def kill(self) -> None:
        """Without a word to anybody."""
        self.process.kill()
        await self.process.communicate()


class Rig:
    """Host memory with a budget that a test may change, and workers."""

    def __init__(self, budget_bytes: int, store: DescriptorStore | None) -> None:
        self.budget_bytes = budget_bytes
        self.pinned_models: set[str] = set()
        self.now_s = 0.0
        self.ends: dict[int, ControlEnd] = {}
        self.listeners: dict[int, asyncio.Task[None]] = {}
        self.locals: list[LocalWorker] = []
        self.memory = HostMemory(
            lambda worker, message, descriptors: self.ends[worker].send(message, (), descriptors),
            lambda held_bytes: self.budget_bytes,
            lambda: self.pinned_models,
            lambda: self.now_s,
            Inheritance(store),
        )

    async def local(self, number: int = 0, *, pin: Pin | None = None) -> LocalWorker:
        ours, theirs = socket.socketpair()
        await self._listen(number, ours)
        worker = LocalWorker(DiskReader(threads=2, chunk_bytes=1 << 20), theirs, pin)
        self.locals.append(worker)
        return worker

    async def process(self, number: int = 0) -> ProcessWorker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(SCRIPT), str(theirs.fileno()), str(PIECE_BYTES)),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *_search_path()])},
            )
        await self._listen(number, ours)
        return ProcessWorker(process)

    async def lost(self, number: int = 0) -> None:
        """A worker's process has ended; as the supervisor does, say so after its channel."""
        await self.listeners.pop(number)
        self.ends.pop(number).close()
        self.memory.worker_lost(number)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.005)

    def figure(self, name: str) -> int:
        return self.memory.figures()[name]

    async def _listen(self, number: int, channel: socket.socket) -> None:
        self.ends[number] = ControlEnd(channel)
        self.listeners[number] = asyncio.create_task(self._take_news(number))

    async def _take_news(self, number: int) -> None:
        def take(news: object, _: object) -> None:
            self.memory.on_news(news, number)  # type: ignore[arg-type]

        await self.ends[number].listen(take)


@asynccontextmanager
async def rig(
    budget_bytes: int = 1 << 30, store: DescriptorStore | None = None
) -> AsyncIterator[Rig]:
    it = Rig(budget_bytes, store)
    try:
        yield it
    finally:
        for end in it.ends.values():
            end.close()
        for listener in it.listeners.values():
            await listener
        for worker in it.locals:
            await asyncio.to_thread(worker.stop)
        await it.memory.close()
