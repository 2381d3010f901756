"""A small real ROUTER peer whose answers are scripted, for what a good daemon never does.

It speaks the protocol by default; a test replaces single answers to be silent, slow, wrong or gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from offload_protocol.codec import decode_request, encode, plain
from offload_protocol.limits import DEFAULT_LIMITS
from offload_protocol.messages import (
    PROTOCOL_VERSION,
    Error,
    Finished,
    Progress,
    Reply,
    Request,
    Submit,
)
from offload_protocol.records import ErrorInfo, JobInfo, Outcome, Welcome

STEPS = 3
SILENT = "silent"


class Caller:
    """Who sent a message, and the means to answer."""

    def __init__(self, socket: Any, identity: bytes) -> None:
        self._socket = socket
        self.identity = identity

    def send(self, message: msgspec.Struct, *frames: bytes) -> None:
        """Send a well-formed message."""
        self.send_raw(encode(message), *frames)

    def send_raw(self, *frames: bytes) -> None:
        """Send anything."""
        self._socket.send_multipart([self.identity, *frames])

    def reply(self, request: Request, result: msgspec.Struct | dict[str, Any]) -> None:
        """Answer a request."""
        data = plain(result) if isinstance(result, msgspec.Struct) else result
        self.send(Reply(rid=request.rid, result=data))

    def refuse(self, request: Request, code: str, message: str = "no", **details: Any) -> None:
        """Refuse a request."""
        info = ErrorInfo(code=code, message=message, details=details)
        self.send(Error(rid=request.rid, error=info))


Answer = Callable[[Caller, Any], None]


def ignore(caller: Caller, request: Any) -> None:
    """The answer of a daemon that hangs."""


def finished(job: str, width: int = 2, height: int = 1) -> tuple[Finished, bytes]:
    """The end of a job that drew one red picture, and its frame."""
    image = {"$image": 0, "mode": "RGB", "size": [width, height]}
    outcome = Outcome(outputs={"images": [image]}, seeds=[7], peak_device_bytes=5, moved_bytes=6)
    end = Finished(job=job, state="done", outcome=outcome)
    return end, b"\xff\x00\x00" * (width * height)


def info_of(request: Any, state: str = "queued", **more: Any) -> JobInfo:
    """What a daemon says of a job."""
    model = getattr(request, "model", "shapes")
    return msgspec.convert({"job": request.job, "model": model, "state": state, **more}, JobInfo)


class Peer:
    """The peer; answers in a thread of its own. `heard` lists all requests in their order."""

    def __init__(self, endpoint: str, instance: str = "first") -> None:
        self.endpoint = endpoint
        self.instance = instance
        self.heard: list[Any] = []
        self.answers: dict[str, Answer] = {}
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def ops(self) -> list[str]:
        """The names of the operations heard."""
        return [type(request).__name__.lower() for request in self.heard]

    def count(self, op: str) -> int:
        """How often an operation was heard."""
        return self.ops().count(op)

    def start(self) -> None:
        """Bind, and answer from now on."""
        self._thread.start()
        assert self._bound.wait(5)

    def stop(self) -> None:
        """Go away as a killed daemon does."""
        self._stop.set()
        self._thread.join(5)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(self.endpoint)
        self._bound.set()
        while not self._stop.is_set():
            if router.poll(10):
                identity, body, *_ = router.recv_multipart()
                request = decode_request(body, DEFAULT_LIMITS)
                self.heard.append(request)
                op = type(request).__name__.lower()
                scripted: Answer = getattr(self, f"_on_{op}", self._acknowledge)
                answer = self.answers.get(op, scripted)
                answer(Caller(router, identity), request)
        router.close()
        context.term()

    def _acknowledge(self, caller: Caller, request: Any) -> None:
        caller.reply(request, {})

    def _on_hello(self, caller: Caller, request: Any) -> None:
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            daemon_version="0",
            instance=self.instance,
            limits=DEFAULT_LIMITS,
        )
        caller.reply(request, welcome)

    def _on_submit(self, caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request, position=1))
        for step in range(STEPS + 1):
            caller.send(Progress(job=request.job, state="running", step=step, steps=STEPS))
        caller.send(*finished(request.job))

    def _on_cancel(self, caller: Caller, request: Any) -> None:
        caller.reply(request, info_of(request, "cancelled"))
        info = ErrorInfo(code="cancelled", message="the job was cancelled")
        caller.send(Finished(job=request.job, state="cancelled", error=info))

    def _on_jobs(self, caller: Caller, request: Any) -> None:
        row = {"job": "a", "model": "shapes", "state": "running", "step": 1, "steps": STEPS}
        caller.reply(request, {"jobs": [row]})

    def _on_models(self, caller: Caller, request: Any) -> None:
        caller.reply(request, {"models": [{"name": "shapes", "state": "ready", "future": 1}]})

    def _on_pin(self, caller: Caller, request: Any) -> None:
        caller.reply(request, {"name": request.name, "pinned": True})

    def _on_unpin(self, caller: Caller, request: Any) -> None:
        caller.reply(request, {"name": request.name})

    def _on_load(self, caller: Caller, request: Any) -> None:
        caller.reply(request, {"name": request.name, "source": request.source or ""})


@contextmanager
def peer_at(path: Path, **answers: Answer) -> Iterator[Peer]:
    """A peer that is there for a block."""
    peer = Peer(f"ipc://{path}")
    peer.answers.update(answers)
    peer.start()
    try:
        yield peer
    finally:
        peer.stop()
