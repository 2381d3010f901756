"""Starts a real worker process and speaks the control plane's side of its channel."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from offload_protocol import values
from offloadd.channel.arena import ArenaNews, ArenaOrder
from offloadd.channel.messages import (
    DeviceReport,
    FromWorker,
    JobEnded,
    RunJob,
    ToWorker,
    WorkerNews,
)
from offloadd.store.arena.alone import Alone

News = TypeVar("News", bound=FromWorker)
WAIT_S = 200.0

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_decoder = msgspec.msgpack.Decoder(WorkerNews)


class WorkerProcess:
    """A worker and our end of its channel; `news` holds everything it has said."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, log: Path) -> None:
        self.process = process
        self.channel = channel
        self.news: list[FromWorker] = []
        self._log = log
        self._memory = Alone()
        self._memory.answer = self._grant

    def send(
        self,
        message: ToWorker,
        frames: Sequence[values.Frame] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        body = msgspec.msgpack.encode(message)
        parts = [body, *map(bytes, frames)]
        head = _COUNT.pack(len(parts)) + b"".join(_LENGTH.pack(len(part)) for part in parts)
        data = head + b"".join(parts)
        if descriptors:
            # They travel with the first byte.
            socket.send_fds(self.channel, [data[:1]], list(descriptors))
            data = data[1:]
        self.channel.sendall(data)

    def receive(self) -> tuple[FromWorker, list[bytes]]:
        (count,) = _COUNT.unpack(self._exactly(_COUNT.size))
        lengths = [_LENGTH.unpack(self._exactly(_LENGTH.size))[0] for _ in range(count)]
        body, *frames = (self._exactly(length) for length in lengths)
        message: FromWorker = _decoder.decode(body)
        if isinstance(message, ArenaNews):
            self._memory.send(message)
            return self.receive()
        self.news.append(message)
        return message, frames

    def expect(self, kind: type[News], **fields: Any) -> News:
        """The next message of that kind with these fields; what comes before is kept in `news`."""
        return self.expect_frames(kind, **fields)[0]

    def expect_frames(self, kind: type[News], **fields: Any) -> tuple[News, list[bytes]]:
        while True:
            message, frames = self.receive()
            if isinstance(message, kind) and all(
                getattr(message, name) == value for name, value in fields.items()
            ):
                return message, frames

    def next_of(self, *kinds: type[FromWorker]) -> tuple[FromWorker, list[bytes]]:
        """The next message of one of these kinds."""
        while True:
            message, frames = self.receive()
            if isinstance(message, kinds):
                return message, frames

    def run(self, job: str, model: str, seed: int = 1, **arguments: Any) -> JobEnded:
        """Run a job to its end; images and arrays of its outcome are unpacked."""
        frames: list[values.Frame] = []
        packed = values.pack(arguments, frames)
        self.send(RunJob(job=job, model=model, arguments=packed, seed=seed), frames)
        return self.end_of(job)

    def end_of(self, job: str) -> JobEnded:
        return self.unpacked(*self.expect_frames(JobEnded, job=job))

    def unpacked(self, ended: JobEnded, frames: list[bytes]) -> JobEnded:
        """The end of a job with its outputs as values."""
        if ended.outcome is None:
            return ended
        outputs = values.unpack(ended.outcome.outputs, frames)
        return msgspec.structs.replace(
            ended, outcome=msgspec.structs.replace(ended.outcome, outputs=outputs)
        )

    def _grant(self, order: ArenaOrder, descriptors: Sequence[int]) -> None:
        self.send(order, descriptors=descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def log(self) -> str:
        return self._log.read_text()

    def _exactly(self, size_bytes: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            piece = self.channel.recv(size_bytes - len(data))
            if not piece:
                raise EOFError(f"the worker ended; its log:\n{self.log()}")
            data += piece
        return data


@contextmanager
def worker_process(
    *, device: str = "cpu", command: Sequence[str] = ("-m", "offloadd.worker"), ready: bool = True
) -> Iterator[WorkerProcess]:
    """A worker that has found its device (unless not `ready`); it is ended with the context."""
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    with tempfile.TemporaryDirectory() as directory, ours:
        log = Path(directory) / "log"
        with log.open("wb") as stderr, theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, *command),
                    *("--channel-fd", str(theirs.fileno()), "--device", device),
                ],
                pass_fds=[theirs.fileno()],
                stderr=stderr,
            )
        worker = WorkerProcess(process, ours, log)
        try:
            if ready:
                worker.expect(DeviceReport)
            yield worker
        finally:
            ours.close()
            try:
                process.wait(timeout=10)
            finally:
                process.kill()
                process.wait()
