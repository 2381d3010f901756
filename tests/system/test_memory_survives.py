"""Weights outlive the daemon in memory, be it killed or restarted, by a systemd that is real."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from system.container import CannotBoot, Container
from system.service import UNITS, installed

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parent / "memory_service.py"
UNIT = """\
[Service]
Type=notify
NotifyAccess=main
ExecStart=/opt/offloadd/bin/python /opt/memory_service.py
Restart=on-failure
RestartSec=100ms
{store}
"""


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A machine on which the service is known and runs."""
    try:
        with installed(tmp_path_factory.mktemp("memory")) as container:
            write(container, "/opt/memory_service.py", SCRIPT.read_text())
            unit = UNIT.format(store=stored_by_the_shipped_unit("offloadd.service"))
            write(container, "/run/systemd/system/memory.service", unit)
            container.call("systemctl", "daemon-reload")
            manage(container, "start")
            yield container
    except CannotBoot as reason:
        pytest.skip(f"no systemd can be booted here: {reason}")


@pytest.mark.parametrize("unit", ["offloadd.service", "user/offloadd.service"])
def test_the_units_let_memory_be_kept(unit: str) -> None:
    most = int(stored_by_the_shipped_unit(unit).partition("=")[2])
    # A terabyte of weights, and the index.
    assert most > (1 << 40) // (256 << 20) - 1


def test_a_killed_daemons_successor_has_the_weights_and_reads_nothing(container: Container) -> None:
    first = status(container)
    assert first["digest"] is not None
    container.call("systemctl", "kill", "-s", "KILL", "memory")
    later = status(container, after=first)
    assert later["digest"] is not None
    assert later["read_bytes"] == 0


def test_a_restarted_daemon_has_the_weights_and_reads_nothing(container: Container) -> None:
    before = status(container)
    manage(container, "restart")
    later = status(container, after=before)
    assert later["digest"] == before["digest"] is not None
    assert later["read_bytes"] == 0


def test_a_plain_stop_discards_them(container: Container) -> None:
    before = status(container)
    manage(container, "stop")
    manage(container, "start")
    assert status(container, after=before)["digest"] is None


def stored_by_the_shipped_unit(name: str) -> str:
    found = re.search(r"(?m)^FileDescriptorStoreMax=\d+$", (UNITS / name).read_text())
    assert found is not None
    return found[0]


def manage(container: Container, what: str) -> None:
    done = container.run("systemctl", what, "memory", limit_s=120)
    assert done.returncode == 0, journal(container)


def journal(container: Container) -> str:
    return container.run("journalctl", "--unit=memory", "--output=cat").stdout


def write(container: Container, path: str, text: str) -> None:
    encoded = base64.b64encode(text.encode()).decode()
    container.call("sh", "-c", f"echo {encoded} | base64 -d >{path}")


def status(container: Container, after: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the service says of itself; waits for another life than that of `after`."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done = container.run("cat", "/run/memory_service.json")
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        if found and (after is None or found["pid"] != after["pid"]):
            return found
        time.sleep(0.2)
    raise AssertionError(f"no new life of the service: {journal(container)}")
