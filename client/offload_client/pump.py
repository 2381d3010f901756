"""Waiting without a thread of our own: whoever waits moves the messages of all who wait.

One waiter leads: it alone polls the socket, with the lock released. The others sleep until
something changed. A leader that has what it wanted leaves and wakes the rest, and one leads on.
The lock guards session, channel and records; the channel is touched by the leader, or by a thread
that holds the lock while nobody leads, so never by two threads at once.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from offload_client.core import Core
from offload_client.waiting import ConnectionMissing, Wait


class Locked:
    """What `Pump.locked` gives; no generator, which would cost a small job three times as much."""

    __slots__ = ("_core", "_listens", "_pump")

    def __init__(self, pump: Pump, core: Core, listens: bool) -> None:
        self._pump = pump
        self._core = core
        self._listens = listens

    def __enter__(self) -> None:
        self._core.check_usable()
        self._pump.lock.acquire()
        try:
            self._core.check_usable()
        except BaseException:
            self._pump.lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._pump.nudge(self._listens)
        finally:
            self._pump.lock.release()


class Pump:
    """The lock of one client and the ways to wait under it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._changed = threading.Condition(threading.RLock())
        self._led = False
        self._wake: io.FileIO | None = None

    def open(self) -> None:
        """Get the descriptor that wakes a waiting leader; a file object, so that it cannot leak."""
        self._wake = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")

    def locked(self, *, listens: bool = True) -> Locked:
        """Hold the lock, and let what was asked go out; with `listens`, take what has come."""
        return Locked(self, self._core, listens)

    def nudge(self, listens: bool = True) -> None:
        """Move what can move now; the lock is held. A leader is woken to do it instead."""
        if self._led:
            os.eventfd_write(self._wake_fd, 1)
        elif not listens:
            self._core.channel.push()
        else:
            self._core.channel.pump(time.monotonic())

    def wait(self, is_ready: Callable[[], bool], wait: Wait) -> None:
        """Return when `is_ready`; raises what `Wait.check` says, or `Unreachable`."""
        with self._changed:
            try:
                while not is_ready():
                    self._core.check_usable()
                    session, now = self._core.session, time.monotonic()
                    wait.check(session, now)
                    next_check = wait.next_check(session)
                    timeout_s = None if next_check is None else max(0.0, next_check - now)
                    if self._led:
                        self._changed.wait(timeout_s)
                    else:
                        self._lead(timeout_s)
            except ConnectionMissing as missing:
                raise self._core.missing(missing) from None

    def stop(self) -> None:
        """Wake everyone and wait until no thread uses the channel; the lock is held."""
        self._changed.notify_all()
        while self._led:
            os.eventfd_write(self._wake_fd, 1)
            self._changed.wait(0.1)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._wake is not None:
            self._wake.close()
            self._wake = None

    @property
    def lock(self) -> threading.Condition:
        """The lock itself, for opening and closing."""
        return self._changed

    @property
    def _wake_fd(self) -> int:
        assert self._wake is not None, "only an open client has a leader"
        return self._wake.fileno()

    def _lead(self, timeout_s: float | None) -> None:
        channel = self._core.channel
        self._led = True
        try:
            is_woken = True
            self._changed.release()
            try:
                is_woken = channel.poll(self._wake_fd, timeout_s)
            finally:
                self._changed.acquire()
                if is_woken:
                    self._drain_wake()
            channel.pump(time.monotonic())
        except BaseException:
            # An interrupt may have swallowed a message: after a new hello all that is open is
            # said again, and what was lost comes once more.
            session = self._core.peek()
            if session is not None and session.ready:
                session.connection_made(time.monotonic())
            raise
        finally:
            self._led = False
            self._changed.notify_all()

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
