"""The keys that may connect over tcp, and their roles: a directory that an administrator fills.

`use/NAME.pub` lets its holder draw, `administrate/NAME.pub` do all that root can over ipc. The
place of the file gives the role, never its content, which came from the client. A file that is
added works for the next connection; one that is removed stops its holder within `STALE_S`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offload_protocol.errors import InvalidRequest
from offload_protocol.keys import PUBLIC_SUFFIX, read_public

Role = Literal["use", "administrate"]
ROLES: tuple[Role, ...] = ("use", "administrate")
"""Later ones win where a key is in both."""

STALE_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Allowed:
    """The holder of a key: the name of its file, and what it may do."""

    name: str
    role: Role


class AllowList:
    """The allowed keys in a directory."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._keys: Mapping[str, Allowed] = {}
        self._read_s: float | None = None
        self._complaints: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> Allowed | None:
        """Who holds a key, as of `STALE_S` ago at the latest."""
        if self._read_s is None or self._clock() - self._read_s >= STALE_S:
            self.read()
        return self._keys.get(key)

    def read(self) -> None:
        """Read the directory anew; a file that holds no key is left out, and logged once."""
        keys: dict[str, Allowed] = {}
        complaints = set()
        for role in ROLES:
            for path in sorted((self._directory / role).glob(f"*{PUBLIC_SUFFIX}")):
                try:
                    keys[read_public(path)] = Allowed(path.stem, role)
                except InvalidRequest as error:
                    complaints.add(str(error))
        for complaint in complaints - self._complaints:
            _log.warning("%s", complaint)
        self._keys, self._complaints, self._read_s = keys, frozenset(complaints), self._clock()
