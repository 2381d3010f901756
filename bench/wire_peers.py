"""The other ends of `bench/wire.py`: servers that it starts, and clients as bare as they can be."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq

from offload_client import Client
from offload_protocol import codec
from offload_protocol.errors import OffloadError
from offload_protocol.limits import DEFAULT_LIMITS
from offload_protocol.messages import (
    PROTOCOL_VERSION,
    Error,
    Finished,
    Hello,
    Ping,
    Read,
    Reply,
    Submit,
    Taken,
)

_HERE = Path(__file__).parent
BODY: dict[str, Any] = {
    "model": "noop",
    "arguments": {"prompt": "a red circle on a white background"},
}
START_S = 60.0
PIECE_BYTES = DEFAULT_LIMITS.max_piece_bytes
PIECES_UNDER_WAY = 4

CONFIG = """
[queue]
limit = 1024
per_user_limit = 1024
[[models]]
name = "noop"
source = "builtin:noop"
"""
"""All clients of the bench are one user, who is else allowed fewer waiting jobs."""


@contextmanager
def process(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is ended with all of its own when left; what it says goes to a file."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, **options
        )
    try:
        yield child
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(20)
        # LitServe leaves its workers behind.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextmanager
def daemon(directory: Path) -> Iterator[tuple[str, int]]:
    """A daemon with the empty model loaded: its endpoint and its pid."""
    (directory / "offloadd.toml").write_text(CONFIG)
    endpoint = f"ipc://{directory}/offloadd.sock"
    command = [sys.executable, "-m", "offloadd", "--endpoint", endpoint, "--device", "cpu"]
    command += ["--config", f"{directory}/offloadd.toml", "--state-dir", f"{directory}/state"]
    with process(command, directory / "daemon.log") as child:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with Client(endpoint) as client:
                    client.load("noop", timeout_s=START_S)
                break
            except OffloadError:
                if child.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield endpoint, child.pid


@contextmanager
def server(kind: str, place: str, directory: Path) -> Iterator[None]:
    """`echo`, `floor`, `starlette` or `litserve`."""
    command = [str(_HERE / "wire_servers.py"), kind, place]
    if kind == "litserve":
        command = [str(_HERE / "wire_litserve.py"), place]
    with process([sys.executable, *command], directory / f"{kind}.log"):
        yield


class Echo:
    """A bare DEALER."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.socket: Any = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self._body = codec.encode(Submit(rid=1, job=os.urandom(16).hex(), **BODY))

    def once(self) -> None:
        """One round trip of a message like a submit's."""
        self.socket.send(self._body)
        self.socket.recv()

    def fetch(self, size_bytes: int) -> None:
        """One round trip with a large answer."""
        self.socket.send(b"send %d" % size_bytes)
        assert len(self.socket.recv_multipart(copy=False)[1].buffer) == size_bytes


class Http:
    """One kept-alive connection of the standard library's client."""

    def __init__(self, place: str) -> None:
        self._connection = _connection(place)
        self._body = json.dumps({"job": os.urandom(16).hex(), **BODY})

    def once(self) -> None:
        """One round trip."""
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/generate", self._body, headers)
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text


def http_client(place: str) -> Http:
    """A client of a server that may still be starting; raises what the last attempt met."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            client = Http(place)
            client.once()
            return client
        except (OSError, http.client.HTTPException, AssertionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _connection(place: str) -> http.client.HTTPConnection:
    if place.isdigit():
        return http.client.HTTPConnection("127.0.0.1", int(place))
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(place)
    return connection


def free_port() -> str:
    """A port of the loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class WireClient:
    """The protocol on a bare DEALER: one job after another, each awaited and taken."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, name: str) -> None:
        self.socket: Any = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.name = name
        self.ended = 0
        self.latencies_s: list[float] = []
        self._rids = itertools.count(1)
        self._job = ""
        self._reads: set[int] = set()
        self._places: Iterator[int] = iter(())
        self._missing_bytes = 0
        self._began_s = 0.0

    def greet(self) -> None:
        """Say hello and wait for its answer."""
        hello = Hello(rid=0, version=PROTOCOL_VERSION, session=self.name, program=self.name)
        self.socket.send(codec.encode(hello))
        assert isinstance(codec.decode_answer(self.socket.recv()), Reply)

    def begin(self, **arguments: Any) -> None:
        """Submit the next job."""
        self._job, self._began_s = os.urandom(16).hex(), time.perf_counter()
        chosen = {**BODY, "arguments": {**BODY["arguments"], **arguments}}
        self.socket.send(codec.encode(Submit(rid=next(self._rids), job=self._job, **chosen)))

    def read(self) -> bool:
        """Take one message; True where it was the end of the job."""
        frames = self.socket.recv_multipart(copy=False)
        answer = codec.decode_answer(frames[0].buffer)
        if isinstance(answer, Error):
            raise codec.to_exception(answer.error)
        if isinstance(answer, Reply) and answer.rid in self._reads:
            self._reads.discard(answer.rid)
            self._missing_bytes -= len(frames[1].buffer)
            self._read_next()
            if self._missing_bytes:
                return False
        elif not isinstance(answer, Finished) or answer.job != self._job:
            return False
        elif answer.sizes:
            (size_bytes,) = answer.sizes
            self._missing_bytes, self._places = size_bytes, iter(range(0, size_bytes, PIECE_BYTES))
            for _ in range(PIECES_UNDER_WAY):
                self._read_next()
            return False
        else:
            assert answer.state == "done", answer
        self.latencies_s.append(time.perf_counter() - self._began_s)
        self.ended += 1
        self.socket.send(codec.encode(Taken(rid=next(self._rids), job=self._job, quiet=True)))
        return True

    def _read_next(self) -> None:
        offset = next(self._places, None)
        if offset is not None:
            rid = next(self._rids)
            self._reads.add(rid)
            self.socket.send(codec.encode(Read(rid=rid, job=self._job, frame=0, offset=offset)))

    def once(self) -> None:
        """One job from submit to end."""
        self.begin()
        while not self.read():
            pass

    def ping(self) -> float:
        """The seconds until an empty answer."""
        rid, start = next(self._rids), time.perf_counter()
        self.socket.send(codec.encode(Ping(rid=rid)))
        while True:
            answer = codec.decode_answer(self.socket.recv())
            if isinstance(answer, Reply) and answer.rid == rid:
                return time.perf_counter() - start
