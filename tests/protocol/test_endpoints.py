"""The endpoint rules: where clients look, where the daemon binds, and what is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from offload_protocol.endpoints import (
    checked_endpoint,
    client_endpoint,
    daemon_endpoint,
    ipc_path,
)
from offload_protocol.errors import InvalidRequest

SYSTEM = "ipc:///run/offloadd/offloadd.sock"


def test_a_client_goes_by_argument_then_environment() -> None:
    environ = {"OFFLOADD_ENDPOINT": "ipc:///e"}
    assert client_endpoint("ipc:///a", environ).endpoint == "ipc:///a"
    choice = client_endpoint(None, environ)
    assert choice.endpoint == "ipc:///e"
    assert choice.tried == ("OFFLOADD_ENDPOINT ipc:///e",)


def test_a_client_prefers_its_users_daemon_where_there_is_one(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    users = f"ipc://{tmp_path}/offloadd/offloadd.sock"
    choice = client_endpoint(None, environ)
    assert choice.endpoint == SYSTEM
    assert choice.tried == (users, SYSTEM)
    (tmp_path / "offloadd").mkdir()
    (tmp_path / "offloadd" / "offloadd.sock").touch()
    assert client_endpoint(None, environ).endpoint == users
    assert client_endpoint(None, {}).endpoint == SYSTEM


@pytest.mark.parametrize(
    ("explicit", "environ", "endpoint"),
    [
        ("ipc:///a", {"OFFLOADD_ENDPOINT": "ipc:///e"}, "ipc:///a"),
        (None, {"OFFLOADD_ENDPOINT": "ipc:///e", "RUNTIME_DIRECTORY": "/r"}, "ipc:///e"),
        (None, {"RUNTIME_DIRECTORY": "/r:/s", "XDG_RUNTIME_DIR": "/x"}, "ipc:///r/offloadd.sock"),
        (None, {"XDG_RUNTIME_DIR": "/x"}, "ipc:///x/offloadd/offloadd.sock"),
        (None, {}, SYSTEM),
        ("", {}, SYSTEM),
    ],
)
def test_the_daemon_binds_by_the_rules(
    explicit: str | None, environ: dict[str, str], endpoint: str
) -> None:
    assert daemon_endpoint(explicit, environ) == endpoint


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("", "is not an endpoint"),
        ("/run/x.sock", "is not an endpoint"),
        ("http://x", "is not an endpoint"),
        ("ipc://", "is not an endpoint"),
        ("ipc://relative", "is not absolute"),
        ("ipc:///" + "x" * 107, "has 108 bytes, the limit is 107"),
        ("ipc:///run/\udcff.sock", "not printable"),
        ("ipc:///run/x\0.sock", "not printable"),
        ("ipc:///run/x.sock\n", "not printable"),
        ("tcp://127.0.0.1", "is not an endpoint"),
        ("tcp://127.0.0.1:", "is not an endpoint"),
        ("tcp://127.0.0.1:http", "is not an endpoint"),
        ("tcp://127.0.0.1:0", "is not an endpoint"),
        ("tcp://:7000", "is not an endpoint"),
    ],
)
def test_case_58_unusable_endpoints_are_refused(endpoint: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        checked_endpoint(endpoint)


def test_an_ipc_endpoint_has_a_path() -> None:
    assert ipc_path(SYSTEM) == Path("/run/offloadd/offloadd.sock")
    assert ipc_path("tcp://127.0.0.1:1") is None


def test_another_users_runtime_directory_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_permission(path: object, **options: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", no_permission)
    choice = client_endpoint(None, {"XDG_RUNTIME_DIR": "/run/user/1000"})
    assert choice.endpoint == SYSTEM
    assert len(choice.tried) == 2
