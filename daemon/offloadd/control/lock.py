"""One daemon per endpoint: an exclusive lock on a file beside the socket, held until exit.

ZeroMQ unlinks a socket that is already there and binds anew without a word, so a second daemon
would steal the first one's clients; the lock is what refuses it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from offload_protocol.errors import InvalidRequest


class EndpointTaken(InvalidRequest):
    """Another daemon serves this endpoint; `details["pid"]` is its process id, where known."""


class EndpointLock:
    """The held lock; `release` removes its file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path) -> EndpointLock:
        """Lock `path`, which is created if need be, and write this process's id into it.

        Raises `EndpointTaken` where another process holds it, `OSError` where it cannot be made.
        """
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = _written_pid(descriptor)
                os.close(descriptor)
                raise _taken(path, pid) from None
            if _is_still_at(path, descriptor):
                break
            # Its last holder removed the file between our open and our lock: that lock is void.
            os.close(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(path, descriptor)

    def release(self) -> None:
        """Remove the file, then let go: in that order, so that nobody locks a dead file."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _written_pid(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip()
    return int(text) if text.isdecimal() else None


def _taken(path: Path, pid: int | None) -> EndpointTaken:
    holder = f"process {pid}" if pid is not None else "another process"
    return EndpointTaken(
        f"another daemon already serves this endpoint: {holder} holds {path}",
        hint="stop it first, or give this one another --endpoint",
        details={"pid": pid},
    )
