"""A stopped process goes on until its first thread has been scheduled to hear of the stop."""

from __future__ import annotations

import time

import psutil


def wait_until_stopped(pid: int, timeout_s: float = 20.0) -> None:
    """Wait until SIGSTOP, already sent, has taken hold."""
    process, deadline = psutil.Process(pid), time.monotonic() + timeout_s
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.005)
