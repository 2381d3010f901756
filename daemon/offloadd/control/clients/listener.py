"""The listening socket: made under the endpoint's lock, never wider open than configured.

The umask belongs to the whole process and the mode of a bound socket follows it, so the mode is set
on the descriptor before it is bound: Linux gives the file that mode, and there is no moment at
which another user could connect.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from offload_protocol.endpoints import ipc_path, tcp_address
from offload_protocol.errors import InvalidRequest
from offloadd.control.lock import EndpointLock, EndpointTaken

BACKLOG = 256


@dataclass(frozen=True, slots=True)
class Access:
    """Who may connect: the socket's mode, and the group it is given to (None: left alone)."""

    mode: int = 0o600
    group_id: int | None = None


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket; over ipc, its file and the lock that makes it ours."""

    endpoint: str
    socket: socket.socket
    path: Path | None = None
    lock: EndpointLock | None = None

    def remove(self) -> None:
        """Remove the socket's file and release the endpoint."""
        # Unless ZeroMQ has taken its descriptor.
        self.socket.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        if self.lock is not None:
            self.lock.release()


def listen(endpoint: str, access: Access) -> Listener:
    """Take the endpoint and listen on it; who listens on tcp has to ask peers for keys.

    Raises `EndpointTaken` where another daemon has it, `InvalidRequest` where it cannot be used.
    """
    path = ipc_path(endpoint)
    if path is None:
        return _listen_on_tcp(endpoint)
    try:
        _prepare_directory(path.parent, access)
        lock = EndpointLock.acquire(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise InvalidRequest(
            f"cannot use the endpoint {endpoint}: {error.strerror}: {error.filename}",
            hint="choose a directory that this user may write to",
        ) from error
    try:
        return Listener(endpoint, _bind(path, access), path, lock)
    except (OSError, InvalidRequest) as error:
        lock.release()
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(
            f"cannot listen on {endpoint}: {error.strerror}",
            hint="the group of the socket must be one that this user belongs to",
        ) from error


def _listen_on_tcp(endpoint: str) -> Listener:
    host, port = tcp_address(endpoint)
    try:
        ((family, kind, _, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EndpointTaken(
                f"another process already listens on {endpoint}",
                hint="stop it first, or choose another port",
            ) from None
        raise InvalidRequest(
            f"cannot listen on {endpoint}: {error.strerror}",
            hint="name an address of this machine, as tcp://ADDRESS:PORT",
        ) from None
    listening.setblocking(False)
    return Listener(endpoint, listening)


def _prepare_directory(directory: Path, access: Access) -> None:
    if not directory.is_dir():
        directory.mkdir(mode=0o700, parents=True)
        if access.group_id is not None:
            os.chown(directory, -1, access.group_id)
            directory.chmod(0o750)
    state = directory.stat()
    if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
        raise InvalidRequest(
            f"{directory} may be written by everybody, who could put another socket in our place",
            hint=f"choose another directory, or: chmod o-w {directory}",
        )


def _bind(path: Path, access: Access) -> socket.socket:
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(str(path))
        if access.group_id is not None:
            os.chown(path, -1, access.group_id)
        path.chmod(access.mode)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    # libzmq accepts on its own thread, which a vanished caller must not block.
    listening.setblocking(False)
    return listening


def _remove_stale(path: Path) -> None:
    # The lock is ours, so a socket that is there belongs to a daemon that died.
    try:
        state = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(state.st_mode):
        raise InvalidRequest(
            f"{path} is there already and is no socket", hint="remove it, or use another endpoint"
        )
    path.unlink()
