"""The one place that knows the endpoint rules: where the daemon binds and where clients look."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offload_protocol.errors import InvalidRequest

SOCKET_NAME = "offloadd.sock"
SYSTEM_DIRECTORY = Path("/run/offloadd")
MAX_IPC_PATH_BYTES = 107
"""Linux limits a socket's path to 108 bytes with its closing zero."""

_TCP = re.compile(r".+:(?!0+$)[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class EndpointChoice:
    """The endpoint that the rules chose, and each place that was looked at, for error messages."""

    endpoint: str
    tried: tuple[str, ...]


def client_endpoint(explicit: str | None, environ: Mapping[str, str]) -> EndpointChoice:
    """Where a client connects: argument, `OFFLOADD_ENDPOINT`, the user's socket, the system's."""
    for given, origin in ((explicit, ""), (environ.get("OFFLOADD_ENDPOINT"), "OFFLOADD_ENDPOINT ")):
        if given:
            endpoint = checked_endpoint(given)
            return EndpointChoice(endpoint, (f"{origin}{endpoint}",))
    candidates = [SYSTEM_DIRECTORY / SOCKET_NAME]
    if environ.get("XDG_RUNTIME_DIR"):
        candidates.insert(0, Path(environ["XDG_RUNTIME_DIR"]) / "offloadd" / SOCKET_NAME)
    tried = tuple(f"ipc://{candidate}" for candidate in candidates)
    # Not Path.exists, which raises for a directory of another user, such as sudo leaves behind.
    found = next((path for path in candidates[:-1] if os.path.exists(path)), candidates[-1])  # noqa: PTH110
    return EndpointChoice(checked_endpoint(f"ipc://{found}"), tried)


def daemon_endpoint(explicit: str | None, environ: Mapping[str, str]) -> str:
    """Where the daemon binds: argument, `OFFLOADD_ENDPOINT`, systemd's or the user's directory."""
    given = explicit or environ.get("OFFLOADD_ENDPOINT")
    if given:
        return checked_endpoint(given)
    if environ.get("RUNTIME_DIRECTORY"):
        # systemd joins several directories with colons; ours is the first.
        directory = Path(environ["RUNTIME_DIRECTORY"].split(":")[0])
    elif environ.get("XDG_RUNTIME_DIR"):
        directory = Path(environ["XDG_RUNTIME_DIR"]) / "offloadd"
    else:
        directory = SYSTEM_DIRECTORY
    return checked_endpoint(f"ipc://{directory / SOCKET_NAME}")


def checked_endpoint(endpoint: str) -> str:
    """The endpoint itself, or `InvalidRequest` where ZeroMQ could not use it."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise InvalidRequest(
            f"{endpoint!r} is not an endpoint",
            hint="write ipc:///path/to/socket or tcp://HOST:PORT",
        )
    if not endpoint.isprintable():
        # ZeroMQ takes UTF-8 up to a zero, and nobody sees what a path ends with.
        raise InvalidRequest(
            f"{endpoint!r} has characters that are not printable", hint="choose another path"
        )
    if scheme == "ipc" and len(rest.encode()) > MAX_IPC_PATH_BYTES:
        raise InvalidRequest(
            f"the socket path has {len(rest.encode())} bytes, the limit is {MAX_IPC_PATH_BYTES}",
            hint="choose a shorter path",
        )
    if scheme == "tcp" and not _TCP.fullmatch(rest):
        raise InvalidRequest(f"{endpoint!r} is not an endpoint", hint="write tcp://HOST:PORT")
    if scheme == "ipc" and not rest.startswith("/"):
        raise InvalidRequest(f"{endpoint!r} is not absolute", hint="write ipc:///path/to/socket")
    return endpoint


def ipc_path(endpoint: str) -> Path | None:
    """The socket's path, or None for an endpoint that is not ipc."""
    scheme, _, rest = endpoint.partition("://")
    return Path(rest) if scheme == "ipc" else None


def tcp_address(endpoint: str) -> tuple[str, int]:
    """Host and port of a checked `tcp://` endpoint; `*` means every address of the machine."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"{endpoint!r} has no port", hint="write tcp://HOST:PORT")
    return ("0.0.0.0" if host == "*" else host.strip("[]")), int(port)
