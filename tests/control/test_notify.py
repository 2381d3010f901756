"""sd_notify: datagrams to the address that systemd gives, and silence without one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from offloadd.control.notify import Notifier


@pytest.mark.parametrize("address", ["path", "@offloadd-test-{pid}"])
def test_messages_reach_the_address(tmp_path: Path, address: str) -> None:
    name = address.format(pid=os.getpid()) if address[0] == "@" else str(tmp_path / address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name[1:] if name[0] == "@" else name)
        systemd.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": name})
        notifier.ready("Serving")
        assert systemd.recv(100) == b"READY=1\nSTATUS=Serving"
        notifier.stopping()
        assert systemd.recv(100).startswith(b"STOPPING=1")


def test_without_systemd_nothing_happens(tmp_path: Path) -> None:
    Notifier({}).ready("Serving")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("Serving")


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": "/x"}, None),
        ({"WATCHDOG_USEC": "1000000"}, None),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000"}, 0.5),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, None),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "nonsense"}, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_time(
    environ: dict[str, str], interval_s: float | None
) -> None:
    assert Notifier(environ).watchdog_interval_s == interval_s
