"""Weights outlive the daemon in memory, be it killed or restarted, by a systemd that is real."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from system.container import CannotBoot, Container
from system.service import UNITS, installed

pytestmark = pytest.mark.system

CONTROL = "/opt/offloadd/bin/offloadctl"
PICTURE = "/run/picture.png"
START_LIMIT_S = 200.0


class Service:
    """The shipped service in a container, with the model that is always there."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def manage(self, *what: str) -> None:
        done = self.container.run("systemctl", *what, "offloadd", limit_s=START_LIMIT_S)
        assert done.returncode == 0, self.journal()

    def draw(self) -> str:
        """Draw the picture that all tests draw, and give its digest."""
        self.container.call(
            *(CONTROL, "generate", "shapes", "--prompt", "a red circle on a white background"),
            *("--seed", "5", "--steps", "3", "-o", PICTURE),
            limit_s=START_LIMIT_S,
        )
        return self.container.call("sha256sum", PICTURE)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.container.call(CONTROL, "--json", "stats"))
        return found

    def wait_for_other_than(self, pid: int) -> None:
        """Wait until another daemon than that one serves."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            done = self.container.run(CONTROL, "--json", "stats")
            if done.returncode == 0:
                daemon = json.loads(done.stdout)["daemon"]
                if daemon["pid"] != pid and daemon["state"] == "ready":
                    return
            time.sleep(0.3)
        raise AssertionError(f"no other daemon serves: {self.journal()}")

    def hide_weights(self) -> None:
        self._rename("safetensors", "hidden")

    def show_weights(self) -> None:
        self._rename("hidden", "safetensors")

    def journal(self) -> str:
        return self.container.run("journalctl", "--unit=offloadd", "--output=cat").stdout

    def _rename(self, old: str, new: str) -> None:
        script = (
            f'for f in $(find /opt/offloadd/lib -name "*.{old}"); do mv $f ${{f%.*}}.{new}; done'
        )
        self.container.call("sh", "-c", script)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service, started, and its weights in memory."""
    try:
        with installed(tmp_path_factory.mktemp("memory")) as container:
            service = Service(container)
            service.manage("start")
            yield service
    except CannotBoot as reason:
        pytest.skip(f"no systemd can be booted here: {reason}")


@pytest.fixture
def drawn(service: Service) -> Iterator[str]:
    """A picture; its weights are in memory from then on, and their files are gone."""
    digest = service.draw()
    service.hide_weights()
    yield digest
    service.show_weights()


@pytest.mark.parametrize("unit", ["offloadd.service", "user/offloadd.service"])
def test_the_units_let_memory_be_kept(unit: str) -> None:
    found = re.search(r"(?m)^FileDescriptorStoreMax=(\d+)$", (UNITS / unit).read_text())
    assert found is not None
    # A terabyte of weights, and the index.
    assert int(found[1]) > (1 << 40) // (256 << 20) - 1


def test_a_killed_daemons_successor_has_the_weights_and_reads_nothing(
    service: Service, drawn: str
) -> None:
    pid = service.stats()["daemon"]["pid"]
    service.manage("kill", "--signal=KILL")
    service.wait_for_other_than(pid)
    assert service.draw() == drawn
    assert_nothing_was_read(service)


def test_a_restarted_daemon_has_the_weights_and_reads_nothing(service: Service, drawn: str) -> None:
    service.manage("restart")
    assert service.draw() == drawn
    assert_nothing_was_read(service)


def test_a_plain_stop_discards_them(service: Service) -> None:
    before = service.draw()
    service.manage("stop")
    service.manage("start")
    assert service.stats()["store"]["host_used_bytes"] == 0
    assert service.draw() == before
    assert held_bytes(service) > 0


def assert_nothing_was_read(service: Service) -> None:
    # The reports of what was read come within a second of the reading.
    time.sleep(2)
    assert service.stats()["store"]["disk_read_bytes_total"] == 0
    assert held_bytes(service) > 0


def held_bytes(service: Service) -> int:
    (model,) = service.stats()["models"]
    return sum(part["host_bytes"] for part in model["components"])
