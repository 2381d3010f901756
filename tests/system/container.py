"""Boots a real systemd in a container made of this machine's /usr; everything else is its own.

Promises that nothing of the container stays: its root is in memory, and closing it ends every
process of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

BOOT_LIMIT_S = 90.0
STOP_LIMIT_S = 30.0
NOTHING: Mapping[str, str] = MappingProxyType({})


class CannotBoot(Exception):
    """This machine can't boot such a container; the message says why."""


@dataclass(frozen=True, slots=True)
class Container:
    """A running container, entered through the process id of its init."""

    leader: int

    def run(
        self,
        *command: str,
        user: str = "root",
        limit_s: float = 60.0,
        environment: Mapping[str, str] = NOTHING,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it, with a clean environment; past its limit it ends with 124."""
        inside = ["/usr/bin/env", "-i", f"PATH={_PATH}", "LANG=C.UTF-8"]
        inside += [f"{name}={value}" for name, value in environment.items()]
        if user != "root":
            inside = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *inside]
        # The limit is kept in there: from here only nsenter could be killed, not what it started.
        limited = ["timeout", "--kill-after=5", f"{limit_s}", *command]
        return subprocess.run(
            [*_enter(self.leader), *inside, *limited],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s + 30,
            check=False,
        )

    def call(
        self,
        *command: str,
        user: str = "root",
        limit_s: float = 60.0,
        environment: Mapping[str, str] = NOTHING,
    ) -> str:
        """What a command that has to succeed writes to stdout."""
        done = self.run(*command, user=user, limit_s=limit_s, environment=environment)
        assert done.returncode == 0, f"{command} gave {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _enter(leader: int) -> list[str]:
    return ["nsenter", f"--target={leader}", "--all", "--"]


@contextmanager
def booted(name: str, read_only: Mapping[str, Path], console: Path) -> Iterator[Container]:
    """A container in which the host's paths are bound at the given places, read-only.

    `console` gets what the container says while it boots. Raises `CannotBoot`.
    """
    reason = _missing()
    if reason:
        raise CannotBoot(reason)
    with console.open("wb") as screen:
        manager = subprocess.Popen(
            _command(name, read_only), stdin=subprocess.DEVNULL, stdout=screen, stderr=screen
        )
        try:
            yield Container(_leader(manager, console))
        finally:
            _stop(manager)


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "booting a container needs root"
    for tool, package in (("systemd-nspawn", "systemd-container"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: apt install {package})"
    return None


def _command(name: str, read_only: Mapping[str, Path]) -> list[str]:
    return [
        "systemd-nspawn",
        "--quiet",
        "--directory=/",
        "--volatile=yes",
        # There may be no systemd outside to register with, or to give us a unit.
        "--register=no",
        "--keep-unit",
        f"--machine={name}",
        "--console=pipe",
        *(f"--bind-ro={source}:{target}" for target, source in read_only.items()),
        "--boot",
        "--",
        "systemd.firstboot=off",
        # The host's own services would come up too, since presets enable all of them.
        "systemd.unit=basic.target",
    ]


def _leader(manager: subprocess.Popen[bytes], console: Path) -> int:
    """The container's init, as soon as it has finished booting."""
    found: list[int] = []

    def is_up() -> bool:
        if manager.poll() is not None:
            raise CannotBoot(f"systemd-nspawn ended: {_tail(console)}")
        children = psutil.Process(manager.pid).children()
        found[:] = [child.pid for child in children if child.name() == "systemd"]
        return bool(found) and _is_running(found[0])

    if not _comes_true(is_up, BOOT_LIMIT_S):
        raise CannotBoot(f"no systemd after {BOOT_LIMIT_S:.0f} s: {_tail(console)}")
    return found[0]


def _is_running(leader: int) -> bool:
    ask = [*_enter(leader), "systemctl", "is-system-running"]
    answer = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=False)
    # Degraded: a unit of the host's /usr failed in there, which is no concern of ours.
    return answer.stdout.strip() in ("running", "degraded")


def _stop(manager: subprocess.Popen[bytes]) -> None:
    """By order, else by killing init, which takes every process of the container along."""
    if manager.poll() is not None:
        return
    children = psutil.Process(manager.pid).children()
    manager.terminate()
    try:
        manager.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        for child in children:
            child.kill()
        manager.kill()
        manager.wait(STOP_LIMIT_S)


def _tail(console: Path) -> str:
    return console.read_text(errors="replace")[-500:].strip()


def _comes_true(holds: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
