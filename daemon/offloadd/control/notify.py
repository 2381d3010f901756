"""Tells systemd how the service is, as sd_notify does; without systemd it does nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


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

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # systemd may be gone or its queue full: no reason to stop serving.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel,
        ):
            channel.sendto(text.encode(), self._address)


def _watchdog_us(environ: Mapping[str, str]) -> int:
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0
    text = environ.get("WATCHDOG_USEC", "0")
    return int(text) if text.isdecimal() else 0
