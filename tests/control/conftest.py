"""A running server with a scripted worker, and clients that speak the wire with a plain DEALER."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from offload_protocol import codec
from offload_protocol.messages import (
    PROTOCOL_VERSION,
    Error,
    Finished,
    Hello,
    Progress,
    Read,
    Reply,
    Request,
    Submit,
)
from offloadd.channel.specs import ModelSpec
from offloadd.config import Config
from offloadd.control.clients.entrances import Entrance
from offloadd.control.clients.listener import Access, listen
from offloadd.control.clients.roles import Roles
from offloadd.control.server import Server, Setting
from offloadd.control.workers.supervisor import Patience

WORKER = (sys.executable, str(Path(__file__).with_name("scripted_worker.py")))
MODELS = tuple(
    ModelSpec(name=name, source=f"/{name}") for name in ("good", "other", "bad", "broken", "slow")
)
QUICK = Patience(first_pause_s=0.05, longest_pause_s=0.2, exit_s=1.0)


class WireClient:
    """Says messages and reads answers; what is pushed is kept apart."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, session: str) -> None:
        self.session = session
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.rids = itertools.count(1)
        self.progress: list[Progress] = []
        self.finished: dict[str, tuple[Finished, list[bytes]]] = {}
        self.behind = b""
        """The frames behind the last reply."""
        self.replies: dict[int | None, Reply | Error] = {}

    async def say(self, request: Request, frames: list[bytes] | None = None) -> None:
        await self.socket.send_multipart([codec.encode(request), *(frames or [])])

    async def read(self, timeout_s: float = 15.0) -> None:
        body, *frames = await asyncio.wait_for(self.socket.recv_multipart(), timeout_s)
        message = codec.decode_answer(body)
        match message:
            case Progress():
                self.progress.append(message)
            case Finished():
                self.finished[message.job] = message, frames
            case _:
                self.replies[message.rid] = message
                self.behind = b"".join(frames)

    async def answer(self, rid: int | None) -> Reply | Error:
        while rid not in self.replies:
            await self.read()
        return self.replies.pop(rid)

    async def ask(
        self, kind: type[Request], frames: list[bytes] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The result of a request; raises the error that it was answered with."""
        rid = next(self.rids)
        await self.say(kind(rid=rid, **fields), frames)
        answer = await self.answer(rid)
        if isinstance(answer, Error):
            raise codec.to_exception(answer.error)
        return answer.result

    async def piece(self, job: str, frame: int, offset: int) -> bytes:
        """A piece of a large result."""
        rid = next(self.rids)
        await self.say(Read(rid=rid, job=job, frame=frame, offset=offset))
        await self.answer(rid)
        return self.behind

    async def hello(self, **fields: Any) -> dict[str, Any]:
        fields = {"version": PROTOCOL_VERSION, "session": self.session, "program": "test", **fields}
        return await self.ask(Hello, **fields)

    async def submit(
        self, job: str, prompt: str = "echo", model: str = "good", **fields: Any
    ) -> Any:
        arguments = {"prompt": prompt, **fields.pop("arguments", {})}
        return await self.ask(Submit, job=job, model=model, arguments=arguments, **fields)

    async def read_until_running(self, job: str) -> None:
        while not any(one.job == job and one.state == "running" for one in self.progress):
            await self.read()

    async def end_of(self, job: str) -> tuple[Finished, list[bytes]]:
        while job not in self.finished:
            await self.read()
        return self.finished.pop(job)


class Rig:
    """A running server and the clients of a test."""

    def __init__(self, server: Server, endpoint: str, context: zmq.asyncio.Context) -> None:
        self.server = server
        self.endpoint = endpoint
        self.context = context
        self.sessions = itertools.count(1)
        self.clients: list[WireClient] = []

    def close(self) -> None:
        for client in self.clients:
            client.socket.close(linger=0)

    async def client(self, session: str | None = None) -> WireClient:
        client = self.stranger(session)
        await client.hello()
        return client

    def stranger(self, session: str | None = None) -> WireClient:
        client = WireClient(
            self.context, self.endpoint, session or f"session-{next(self.sessions)}"
        )
        self.clients.append(client)
        return client


Serve = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/offloadd.sock"


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def serve(tmp_path: Path, endpoint: str, context: zmq.asyncio.Context) -> Serve:
    """Starts a server; `worker` are further arguments of the scripted worker."""

    @asynccontextmanager
    async def start(
        config: Config | None = None,
        *,
        worker: tuple[str, ...] = (),
        roles: Roles | None = None,
        models: tuple[ModelSpec, ...] = MODELS,
        patience: Patience = QUICK,
    ) -> AsyncIterator[Rig]:
        config = (config or Config()).model_copy(update={"models": models})
        config = config.model_copy(
            update={"daemon": config.daemon.model_copy(update={"device": "cpu"})}
        )
        listener = listen(endpoint, Access())
        setting = Setting(
            version="0.0.0",
            entrances=(Entrance(listener),),
            state_dir=tmp_path,
            roles=roles or Roles(frozenset({os.getuid()})),
            environ=dict(os.environ),
            worker_command=(*WORKER, *worker),
            patience=patience,
        )
        server = Server(config, setting)
        running = asyncio.create_task(server.run())
        rig = Rig(server, endpoint, context)
        try:
            yield rig
        finally:
            server.stop()
            await running
            rig.close()
            listener.remove()

    return start


@pytest.fixture
def daemons() -> Iterator[list[Any]]:
    """Daemons in processes of their own (`control.processes.Daemon`); ended with the test."""
    daemons: list[Any] = []
    yield daemons
    for daemon in daemons:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait()


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    """Wait for a condition that is asked again and again."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)
