"""The units are right by systemd's own judgement, and run the daemon in a systemd that is real."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from PIL import Image
from system.container import NOTHING, CannotBoot, Container
from system.service import MEMBER, STRANGER, UNITS, installed

from judge_shapes import judge, parse_prompt

pytestmark = pytest.mark.system

PROMPT = "a red circle on a white background"
HIGHEST_EXPOSURE = 2.0
"""systemd's scale from 0 to 10; a unit without any restriction has 9.6."""
START_LIMIT_S = 200.0


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A machine on which offloadd is installed."""
    try:
        with installed(tmp_path_factory.mktemp("systemd")) as container:
            yield container
    except CannotBoot as reason:
        pytest.skip(f"no systemd can be booted here: {reason}")


@pytest.fixture
def running(container: Container) -> Container:
    """That machine with the service started, by this test or by one before it."""
    container.call("systemctl", "start", "offloadd", limit_s=START_LIMIT_S)
    return container


@pytest.mark.parametrize("manager", ["system", "user"])
def test_systemd_finds_no_fault_in_the_unit(manager: str, tmp_path: Path) -> None:
    assert _verify(manager, _text(manager), tmp_path) == ""


def test_systemd_would_find_a_misspelt_key(tmp_path: Path) -> None:
    misspelt = _text("system").replace("KillMode=", "KilMode=")
    assert "KilMode" in _verify("system", misspelt, tmp_path)


def test_the_system_service_is_closed_as_far_as_a_device_allows() -> None:
    command = ["systemd-analyze", "security", "--offline=true", str(UNITS / "offloadd.service")]
    report = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    found = re.search(r"Overall exposure level for offloadd.service: ([\d.]+)", report)
    assert found, report
    assert float(found[1]) < HIGHEST_EXPOSURE


def test_the_daemons_user_may_open_devices_and_has_no_login(container: Container) -> None:
    assert {"offloadd", "render", "video"} <= set(container.call("id", "-nG", "offloadd").split())
    _, _, _, _, _, home, shell = container.call("getent", "passwd", "offloadd").strip().split(":")
    assert home == "/var/lib/offloadd"
    assert shell.endswith("nologin")


def test_the_environment_with_its_token_is_closed_even_to_members(container: Container) -> None:
    container.call("sh", "-c", "echo HF_TOKEN=secret >/etc/offloadd/environment")
    container.call("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/offloadd.conf")
    assert container.run("cat", "/etc/offloadd/environment", user=MEMBER).returncode == 1
    assert container.run("ls", "/etc/offloadd", user=MEMBER).returncode == 0


def test_a_member_of_the_group_draws_through_the_service(running: Container) -> None:
    _draws(running)


def test_the_service_says_in_its_status_and_its_journal_that_all_is_well(
    running: Container,
) -> None:
    assert "Active: active (running)" in running.call("systemctl", "status", "offloadd")
    journal = running.call("journalctl", "--unit=offloadd", "--output=cat")
    assert "Started offloadd.service" in journal
    for complaint in ("Traceback", "Failed to", "Permission denied", "Operation not permitted"):
        assert complaint not in journal


def test_somebody_outside_the_group_reaches_no_daemon(running: Container) -> None:
    refused = running.run("/opt/offloadd/bin/offloadctl", "stats", user=STRANGER)
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "/run/offloadd/offloadd.sock" in refused.stderr


def test_state_and_cache_are_the_daemons_alone(running: Container) -> None:
    for directory in ("/var/lib/offloadd", "/var/cache/offloadd"):
        assert running.call("stat", "-c", "%a %U", directory).strip() == "700 offloadd"


def test_a_frozen_daemon_is_found_by_the_watchdog_and_a_healthy_one_is_left_alone(
    container: Container,
) -> None:
    drop_in = "/run/systemd/system/offloadd.service.d"
    quick = f"mkdir -p {drop_in} && printf '[Service]\\nWatchdogSec=3\\n' >{drop_in}/quick.conf"
    container.call("sh", "-c", f"{quick} && systemctl daemon-reload")
    container.call("systemctl", "restart", "offloadd", limit_s=START_LIMIT_S)
    try:
        first = _property(container, "MainPID")
        time.sleep(5)
        assert _property(container, "MainPID") == first
        container.call("kill", "-STOP", first)
        _wait_until(lambda: _property(container, "NRestarts") == "1", START_LIMIT_S)
        _wait_until(lambda: _property(container, "ActiveState") == "active", START_LIMIT_S)
        _draws(container)
    finally:
        container.call("sh", "-c", f"rm -r {drop_in} && systemctl daemon-reload")


def test_stopping_the_service_is_clean_and_leaves_nothing(running: Container) -> None:
    since = running.call("date", "+%s.%N").strip()
    began = time.monotonic()
    running.call("systemctl", "stop", "offloadd", limit_s=90)
    assert time.monotonic() - began < 15
    assert _property(running, "ActiveState") == "inactive"
    assert _property(running, "Result") == "success"
    assert _property(running, "ExecMainStatus") == "0"
    journal = running.call("journalctl", "--unit=offloadd", f"--since=@{since}", "--output=cat")
    assert "SIGKILL" not in journal
    assert running.run("pgrep", "--uid", "offloadd").stdout == ""
    assert running.run("test", "-e", "/run/offloadd").returncode == 1


def test_a_user_runs_the_daemon_without_any_privilege(container: Container) -> None:
    container.run("systemctl", "stop", "offloadd", limit_s=90)
    uid = container.call("id", "-u", MEMBER).strip()
    here = {"XDG_RUNTIME_DIR": f"/run/user/{uid}", "HOME": f"/home/{MEMBER}"}
    binary = f"/home/{MEMBER}/.local/bin"
    container.call("install", "--directory", "--owner", MEMBER, here["HOME"])
    container.call("mkdir", "-p", binary)
    container.call("ln", "-s", "/opt/offloadd/bin/offloadd", binary)
    container.call("chown", "-R", MEMBER, here["HOME"])
    container.call("systemctl", "start", f"user@{uid}.service")
    systemctl = ("systemctl", "--user")
    start = (*systemctl, "start", "offloadd")
    container.call(*start, user=MEMBER, limit_s=START_LIMIT_S, environment=here)
    _draws(container, here)
    container.call(*systemctl, "stop", "offloadd", user=MEMBER, environment=here)
    result = container.call(
        *systemctl, "show", "--property=Result", "offloadd", user=MEMBER, environment=here
    )
    assert result.strip() == "Result=success"


def _draws(container: Container, environment: Mapping[str, str] = NOTHING) -> None:
    """A member of the group, in a process of its own, gets the picture that was asked for."""
    file = f"/tmp/{time.monotonic_ns()}.png"
    words = ("generate", "shapes", "--prompt", PROMPT, "--seed", "7", "-o", file)
    command = ("/opt/offloadd/bin/offloadctl", *words)
    drawn = container.run(*command, user=MEMBER, limit_s=120, environment=environment)
    if drawn.returncode != 0:
        journal = container.run("journalctl", "--output=cat", "--lines=40", "_COMM=offloadd").stdout
        pytest.fail(f"offloadctl gave {drawn.returncode}: {drawn.stderr}\n{journal}")
    encoded = container.call("base64", file)
    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    verdict = judge(picture, parse_prompt(PROMPT))
    assert verdict.fits, verdict.reasons


def _text(manager: str) -> str:
    folder = UNITS / "user" if manager == "user" else UNITS
    return (folder / "offloadd.service").read_text()


def _verify(manager: str, text: str, directory: Path) -> str:
    """What systemd-analyze has against the unit; the program that it starts has to exist."""
    unit = directory / "offloadd.service"
    unit.write_text(re.sub(r"(?m)^ExecStart=.*$", f"ExecStart={sys.executable}", text))
    done = subprocess.run(
        ["systemd-analyze", f"--{manager}", "verify", unit],
        env={**os.environ, "XDG_RUNTIME_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout + done.stderr


def _property(container: Container, name: str) -> str:
    return container.call("systemctl", "show", f"--property={name}", "--value", "offloadd").strip()


def _wait_until(holds: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"not so after {limit_s:.0f} s"
        time.sleep(0.2)
