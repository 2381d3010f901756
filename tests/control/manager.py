"""The part of a service manager that keeps descriptors, on a real notification socket."""

from __future__ import annotations

import array
import os
import socket
from pathlib import Path

from offloadd.control.notify import Notifier


class Manager:
    """Understands `FDSTORE=1` and `FDSTOREREMOVE=1`; `inherited` is what the next process gets."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(directory / "notify"))
        self.socket.setblocking(False)
        self.kept: dict[str, int] = {}
        self._notifier = Notifier({"NOTIFY_SOCKET": str(directory / "notify")})

    def keep(self, name: str, descriptor: int) -> bool:
        sent = self._notifier.keep(name, descriptor)
        self.read()
        return sent

    def drop(self, name: str) -> None:
        self._notifier.drop(name)
        self.read()

    def read(self) -> None:
        """Take in what was said."""
        while True:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(64))
            except BlockingIOError:
                return
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            name = fields.get("FDNAME", "")
            if fields.get("FDSTOREREMOVE") == "1":
                os.close(self.kept.pop(name))
            elif fields.get("FDSTORE") == "1":
                numbers = array.array("i")
                numbers.frombytes(ancillary[0][2])
                (self.kept[name],) = numbers

    def inherited(self) -> list[tuple[str, int]]:
        return [(name, os.dup(descriptor)) for name, descriptor in self.kept.items()]

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.kept.values():
            os.close(descriptor)
