"""Where clients come in: the daemon's endpoint, and beside it a tcp one for the holders of keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offload_protocol.endpoints import checked_endpoint, ipc_path
from offload_protocol.errors import InvalidRequest
from offload_protocol.keys import KeyPair, read_pair
from offloadd.config import DaemonSection, RemoteSection
from offloadd.control.clients.allow_list import AllowList
from offloadd.control.clients.curve import Curve
from offloadd.control.clients.listener import Access, Listener, listen


@dataclass(frozen=True, slots=True)
class Entrance:
    """A listening socket; with `curve`, for the holders of keys alone."""

    listener: Listener
    curve: Curve | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """The daemon's own key, and those that it lets in."""

    own: KeyPair
    allowed: AllowList


def read_keys(remote: RemoteSection, clock: Callable[[], float]) -> Keys | None:
    """The keys that the configuration names, or None where it names none.

    Raises `InvalidRequest` where only one is named, or where they cannot be read.
    """
    if not remote.key_file and not remote.clients:
        return None
    for key in ("key_file", "clients"):
        if not getattr(remote, key):
            raise InvalidRequest(
                f"remote.{key} is not set, and connections by tcp need it",
                hint="docs/remote.md shows how keys are made and named",
            )
    directory = Path(remote.clients).expanduser()
    # Not Path.is_dir, which raises where a directory above may not be searched.
    if not os.path.isdir(directory):  # noqa: PTH112
        raise InvalidRequest(
            f"remote.clients: there is no directory {directory}",
            hint=f"mkdir -p {directory}/use {directory}/administrate",
        )
    return Keys(read_pair(Path(remote.key_file).expanduser()), AllowList(directory, clock))


def open_entrances(
    daemon: DaemonSection, remote: RemoteSection, access: Access, keys: Keys | None
) -> tuple[Entrance, ...]:
    """Listen where the configuration says, at the daemon's own endpoint first.

    Raises `InvalidRequest` for tcp without keys, and what `listen` raises.
    """
    opened: list[Entrance] = []
    try:
        for endpoint in filter(None, (daemon.endpoint, remote.endpoint)):
            checked_endpoint(endpoint)
            curve = None
            if ipc_path(endpoint) is None:
                if keys is None:
                    raise _needs_keys(endpoint)
                curve = Curve(keys.own, keys.allowed)
            opened.append(Entrance(listen(endpoint, access), curve))
    except InvalidRequest:
        close_entrances(opened)
        raise
    return tuple(opened)


def close_entrances(entrances: tuple[Entrance, ...] | list[Entrance]) -> None:
    """Leave nothing of the endpoints behind."""
    for entrance in entrances:
        entrance.listener.remove()


def _needs_keys(endpoint: str) -> InvalidRequest:
    return InvalidRequest(
        f"{endpoint} is not served without keys: connections would be neither authenticated nor "
        "encrypted",
        hint="make keys with `offloadctl keygen` and name them, as docs/remote.md shows",
    )
