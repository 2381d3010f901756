"""CURVE keys and their files: made by `offloadctl keygen`, read by daemon and clients.

A pair is two TOML files. `NAME.key` holds both halves and stays where it was made, readable by its
owner (and, for a service, its group) alone; `NAME.pub` holds the public half and is given away.
Keys are written as Z85, 40 characters, as ZeroMQ does.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload_protocol.errors import InvalidRequest, StorageFailed

SECRET_SUFFIX, PUBLIC_SUFFIX = ".key", ".pub"
KEY_FILE_VARIABLE, SERVER_KEY_VARIABLE = "OFFLOADD_KEY_FILE", "OFFLOADD_SERVER_KEY"

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MAX_FILE_BYTES = 4096
_TOO_OPEN = stat.S_IRWXO | stat.S_IWGRP


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both halves of a key, as Z85; the secret one is not shown when it is printed."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs for `tcp://`: its own pair, and the public key of its daemon."""

    own: KeyPair
    server: str


def write_pair(pair: KeyPair, directory: Path, name: str) -> tuple[Path, Path]:
    """Write `NAME.key` (mode 0600) and `NAME.pub`; gives their paths.

    Raises `InvalidRequest` where one is there already, or `name` is no fit name, and
    `StorageFailed` where they cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} is not a name for a key", hint="use letters, digits and . _ @ -"
        )
    secret, public = (directory / f"{name}{suffix}" for suffix in (SECRET_SUFFIX, PUBLIC_SUFFIX))
    text = f'# offloadd, the public half: give it away\npublic = "{pair.public}"\n'
    both = f'# offloadd, both halves: keep it\npublic = "{pair.public}"\nsecret = "{pair.secret}"\n'
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(secret, both, 0o600)
        _write_new(public, text, 0o644)
    except FileExistsError as error:
        raise InvalidRequest(
            f"{error.filename} is there already", hint="choose another name, or move it away"
        ) from None
    except OSError as error:
        raise StorageFailed(
            f"cannot write the keys to {directory}: {error.strerror}",
            hint="choose another directory",
        ) from None
    return secret, public


def read_pair(path: Path) -> KeyPair:
    """Both halves from a `.key` file.

    Raises `InvalidRequest` where there are none, or where others may read or change the file.
    """
    table = _read(path)
    if path.stat().st_mode & _TOO_OPEN:
        raise InvalidRequest(
            f"the secret key in {path} can be read or changed by others",
            hint=f"chmod 600 {path}; make a new one where somebody may have done so",
        )
    return KeyPair(_key(table, "public", path), _key(table, "secret", path))


def read_public(path: Path) -> str:
    """The public half, from either file; raises `InvalidRequest` where there is none."""
    return _key(_read(path), "public", path)


def config_directory(environ: Mapping[str, str]) -> Path:
    """Where a user's own keys are, unless they are named."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    return Path(home) / "offloadd"


def client_keys(
    key_file: str | os.PathLike[str] | None,
    server_key: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
) -> ClientKeys:
    """A client's keys: argument, else environment, else `client.key` and `server.pub` of the user.

    `server_key` is the key itself or a file that holds it. Raises `InvalidRequest` where one is
    missing or unfit.
    """
    directory = config_directory(environ)
    own = Path(key_file or environ.get(KEY_FILE_VARIABLE) or directory / "client.key")
    given = server_key or environ.get(SERVER_KEY_VARIABLE)
    server = os.fspath(given or directory / f"server{PUBLIC_SUFFIX}")
    # A path of 40 characters looks like a key: `/home/nicola/.config/offloadd/server.pub`.
    is_key = given and _Z85.fullmatch(server) is not None and not Path(server).is_file()
    return ClientKeys(read_pair(own), server if is_key else read_public(Path(server)))


def _write_new(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.loads(file.read(_MAX_FILE_BYTES).decode())
    except OSError as error:
        raise InvalidRequest(
            f"cannot read the key file {path}: {error.strerror}",
            hint="`offloadctl keygen` makes keys; a daemon's public key comes from whoever runs it",
        ) from None
    except ValueError as error:
        raise InvalidRequest(
            f"{path} is no key file: {error}",
            hint="name a file that `offloadctl keygen` made",
        ) from None


def _key(table: Mapping[str, Any], half: str, path: Path) -> str:
    key = table.get(half)
    if not isinstance(key, str) or not _Z85.fullmatch(key):
        raise InvalidRequest(
            f"{path} holds no {half} key", hint="name the file that `offloadctl keygen` wrote"
        )
    return key
