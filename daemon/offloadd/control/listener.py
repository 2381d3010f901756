"""The listening socket: made under the endpoint's lock, never wider open than configured.

The umask belongs to the whole process and the mode of a bound socket follows it, so the mode is set
on the descriptor before it is bound: Linux gives the file that mode, and there is no moment at
which another user could connect.
"""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from offload_protocol.endpoints import ipc_path
from offload_protocol.errors import InvalidRequest
from offloadd.control.lock import EndpointLock

BACKLOG = 256


@dataclass(frozen=True, slots=True)
class Access:
    """Who may connect: the socket's mode, and the group it is given to (None: left alone)."""

    mode: int = 0o600
    group_id: int | None = None


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and the lock that makes it ours."""

    endpoint: str
    path: Path
    socket: socket.socket
    lock: EndpointLock

    def remove(self) -> None:
        """Remove the socket's file and release the endpoint."""
        self.path.unlink(missing_ok=True)
        self.lock.release()


def listen(endpoint: str, access: Access) -> Listener:
    """Take the endpoint and listen on it.

    Raises `EndpointTaken` where another daemon has it, `InvalidRequest` where it cannot be used.
    """
    path = ipc_path(endpoint)
    if path is None:
        raise InvalidRequest(
            f"{endpoint} cannot be served: connections by tcp would be neither authenticated nor "
            "encrypted",
            hint="use an ipc:// endpoint; other machines can reach it through ssh",
        )
    try:
        _prepare_directory(path.parent, access)
        lock = EndpointLock.acquire(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise InvalidRequest(
            f"cannot use the endpoint {endpoint}: {error.strerror}: {error.filename}",
            hint="choose a directory that this user may write to",
        ) from error
    try:
        return Listener(endpoint, path, _bind(path, access), lock)
    except (OSError, InvalidRequest) as error:
        lock.release()
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(
            f"cannot listen on {endpoint}: {error.strerror}",
            hint="the group of the socket must be one that this user belongs to",
        ) from error


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
