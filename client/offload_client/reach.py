"""Finds out with a plain socket why no daemon can be reached, since ZeroMQ retries in silence.

Nothing is sent: the daemon sees a connection that closes at once.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from pathlib import Path

from offload_protocol.endpoints import EndpointChoice, ipc_path
from offload_protocol.errors import Unreachable

RETRY_S = 0.02

START_HINT = "start it with `offloadd`, or name another endpoint with OFFLOADD_ENDPOINT"


def obstacle(endpoint: str, timeout_s: float) -> str | None:
    """What stands between this process and a listening socket, or None if nothing does.

    Waits up to `timeout_s` for a tcp host, or for an ipc socket whose queue of callers is full; any
    other one answers at once.
    """
    path = ipc_path(endpoint)
    try:
        if path is not None:
            _try_unix(path, timeout_s)
        else:
            _try_tcp(endpoint, timeout_s)
    except OSError as error:
        return _sentence(error, path)
    return None


def unreachable(choice: EndpointChoice, reason: str, timeout_s: float) -> Unreachable:
    """The error that names every place that was tried and what was found at the last."""
    others = [place for place in choice.tried if not place.endswith(choice.endpoint)]
    also = f" (looked at {', '.join(others)} before)" if others else ""
    return Unreachable(
        f"no daemon answers at {choice.endpoint}: {reason}{also}",
        hint=START_HINT,
        details={
            "endpoint": choice.endpoint,
            "tried": list(choice.tried),
            "reason": reason,
            "waited_s": timeout_s,
        },
    )


def _try_unix(path: Path, timeout_s: float) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError(errno.ENOTSOCK, "not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        give_up_at = time.monotonic() + timeout_s
        while True:
            try:
                probe.connect(os.fspath(path))
                return
            except BlockingIOError:
                # Its queue of callers is full: a busy daemon takes them in a moment.
                if time.monotonic() >= give_up_at:
                    raise
                time.sleep(RETRY_S)


def _try_tcp(endpoint: str, timeout_s: float) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise OSError(errno.EINVAL, f"{port!r} is not a port")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
        pass


def _sentence(error: OSError, path: Path | None) -> str:
    if path is None:
        return "the host did not answer" if isinstance(error, TimeoutError) else _words(error)
    if isinstance(error, PermissionError):
        return f"permission denied for user id {os.getuid()}; join the socket's group"
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "there is no such socket"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens on the socket, its daemon has ended"
    if isinstance(error, BlockingIOError):
        return "the daemon does not take connections, it is stopped or overloaded"
    if error.errno == errno.ENOTSOCK:
        return "the path is not a socket"
    return _words(error)


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
