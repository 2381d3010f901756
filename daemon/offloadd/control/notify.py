"""Tells systemd how the service is, as sd_notify does; without systemd it does nothing.

The manager also keeps descriptors for the next process of the service (its descriptor store), as
many as `FileDescriptorStoreMax=` of the unit allows.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence

_FIRST = 3
"""The number of the first descriptor that a manager passes on."""


class Notifier:
    """Sends datagrams to `$NOTIFY_SOCKET`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_us = _watchdog_us(environ)

    @property
    def watchdog_interval_s(self) -> float | None:
        """How often `watchdog` is to be called: half the time that systemd allows, or None."""
        return self._watchdog_us / 2e6 if self._watchdog_us and self._address else None

    def ready(self, status: str) -> None:
        """The service is up."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={status}")

    def stopping(self) -> None:
        """The service is on its way down."""
        self._send("STOPPING=1\nSTATUS=Stopping")

    def watchdog(self) -> None:
        """The event loop runs."""
        self._send("WATCHDOG=1")

    def keep(self, name: str, descriptor: int) -> bool:
        """Put a descriptor into the manager's store; whether it was sent."""
        # Without polling the manager would let go of it at an event that memory never has anyway.
        return self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", [descriptor])

    def drop(self, name: str) -> None:
        """Take what is stored under a name out of the manager's store."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _send(self, text: str, descriptors: Sequence[int] = ()) -> bool:
        if not self._address:
            return False
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        ancillary = [rights] if descriptors else []
        # systemd may be gone or its queue full: no reason to stop serving.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel,
        ):
            channel.sendmsg([text.encode()], ancillary, 0, self._address)
            return True
        return False


class StoredDescriptors:
    """The manager's store of descriptors, as it was when this process began and as it is now."""

    def __init__(self, environ: Mapping[str, str], notifier: Notifier) -> None:
        self._environ = environ
        self.keep = notifier.keep
        self.drop = notifier.drop

    def inherited(self) -> list[tuple[str, int]]:
        """Names and descriptors that the manager gave this process; no child inherits them."""
        environ = self._environ
        if environ.get("LISTEN_PID") != str(os.getpid()):
            return []
        names = environ.get("LISTEN_FDNAMES", "").split(":")
        count = environ.get("LISTEN_FDS", "0")
        found = list(zip(names, range(_FIRST, _FIRST + int(count)), strict=False))
        for _, descriptor in found:
            os.set_inheritable(descriptor, False)
        return found


def _watchdog_us(environ: Mapping[str, str]) -> int:
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0
    text = environ.get("WATCHDOG_USEC", "0")
    return int(text) if text.isdecimal() else 0
