"""Both clients behind one face, so that every behaviour is asked of either."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client.peer import Peer

from offload_client import AsyncClient, Client


class Twin:
    """Makes clients of one kind; `do` gives what a call gives, awaited where it must be."""

    def __init__(self, kind: type[Client] | type[AsyncClient], runner: asyncio.Runner) -> None:
        self.kind = kind
        self._runner = runner
        self._made: list[Any] = []

    def client(self, endpoint: str, **options: Any) -> Any:
        """A client that is closed after the test."""
        self._made.append(self.kind(endpoint, **options))
        return self._made[-1]

    def do(self, outcome: Any) -> Any:
        """The value of a call of either client."""
        if not inspect.isawaitable(outcome):
            return outcome

        async def awaited() -> Any:
            return await outcome

        return self._runner.run(awaited())

    def listed(self, events: Any) -> list[Any]:
        """All items of a plain or an asynchronous iterator."""
        if not hasattr(events, "__aiter__"):
            return list(events)

        async def collect() -> list[Any]:
            return [event async for event in events]

        return self._runner.run(collect())

    def close_all(self) -> None:
        """Close what was made."""
        for client in self._made:
            self.do(client.close())


@pytest.fixture(params=["plain", "asyncio"])
def twin(request: pytest.FixtureRequest) -> Iterator[Twin]:
    with asyncio.Runner() as runner:
        twin = Twin(Client if request.param == "plain" else AsyncClient, runner)
        yield twin
        twin.close_all()


@pytest.fixture
def socket_path() -> Iterator[Path]:
    # Not tmp_path: with a long test name it would be longer than a socket's path may be.
    with tempfile.TemporaryDirectory(prefix="offload-") as directory:
        yield Path(directory) / "s.sock"


@pytest.fixture
def start_peer(socket_path: Path) -> Iterator[Callable[..., Peer]]:
    """Starts peers, one after another, at one endpoint."""
    with contextlib.ExitStack() as stack:

        def start(instance: str = "first", **answers: Any) -> Peer:
            peer = Peer(f"ipc://{socket_path}", instance)
            peer.answers.update(answers)
            peer.start()
            stack.callback(peer.stop)
            return peer

        yield start


@pytest.fixture
def peer(start_peer: Callable[..., Peer]) -> Peer:
    return start_peer()
