"""Why no daemon can be reached, found out before ZeroMQ waits in silence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import pytest

from offload_client import Client, Unreachable
from offload_client.reach import obstacle, unreachable
from offload_protocol.endpoints import EndpointChoice


def listener(path: Path, backlog: int = 8) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(os.fspath(path))
    listening.listen(backlog)
    return listening


def test_nothing_stands_before_a_listening_socket(socket_path: Path) -> None:
    with listener(socket_path):
        assert obstacle(f"ipc://{socket_path}", 1) is None


def test_a_socket_that_is_not_there_is_named(socket_path: Path) -> None:
    assert obstacle(f"ipc://{socket_path}", 1) == "there is no such socket"
    assert obstacle(f"ipc://{__file__}/s.sock", 1) == "there is no such socket"


def test_a_file_that_is_no_socket_is_named(socket_path: Path) -> None:
    socket_path.touch()
    assert obstacle(f"ipc://{socket_path}", 1) == "the path is not a socket"


def test_a_socket_left_behind_by_an_ended_daemon_is_named(socket_path: Path) -> None:
    listener(socket_path).close()
    assert "nobody listens" in (obstacle(f"ipc://{socket_path}", 1) or "")


def test_a_listener_that_takes_no_more_connections_is_named(socket_path: Path) -> None:
    with listener(socket_path, backlog=0), socket.socket(socket.AF_UNIX) as first:
        first.connect(os.fspath(socket_path))
        assert "stopped or overloaded" in (obstacle(f"ipc://{socket_path}", 0.1) or "")


def test_a_full_queue_of_callers_is_waited_out(socket_path: Path) -> None:
    with (
        listener(socket_path, backlog=0) as listening,
        socket.socket(socket.AF_UNIX) as first,
        ThreadPoolExecutor(1) as pool,
    ):
        first.connect(os.fspath(socket_path))
        found = pool.submit(obstacle, f"ipc://{socket_path}", 20)
        assert not wait_for([found], timeout=0.2).done
        listening.accept()[0].close()
        assert found.result(20) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["socket", "directory"])
def test_case_58_a_forbidden_socket_gives_permission_denied_at_once(
    socket_path: Path, closed: str
) -> None:
    with listener(socket_path):
        socket_path.parent.chmod(0o700 if closed == "directory" else 0o755)
        socket_path.chmod(0o600 if closed == "socket" else 0o777)
        code = (
            "import os, sys\nfrom offload_client import Client, Unreachable\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "try:\n    Client(sys.argv[1]).stats()\n"
            "except Unreachable as error:\n    print(error.details['reason'])\n"
        )
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code, f"ipc://{socket_path}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    assert done.stdout == "permission denied for user id 65534; join the socket's group\n"
    assert time.monotonic() - started < 10


def test_a_closed_tcp_port_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        assert obstacle(f"tcp://127.0.0.1:{port}", 1) == "connection refused"


def test_a_listening_tcp_port_is_no_obstacle() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert obstacle(f"tcp://127.0.0.1:{server.getsockname()[1]}", 1) is None


@pytest.mark.parametrize("rest", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:70000"])
def test_a_tcp_endpoint_without_a_port_is_named(rest: str) -> None:
    assert "is not a port" in (obstacle(f"tcp://{rest}", 1) or "")


def test_something_that_listens_but_is_no_daemon_is_named(socket_path: Path) -> None:
    client = Client(f"ipc://{socket_path}", connect_timeout_s=0.4)
    with listener(socket_path), pytest.raises(Unreachable, match="does not speak"):
        client.stats()
    client.close()


def test_the_error_names_every_place_that_was_tried() -> None:
    choice = EndpointChoice("ipc:///b", ("ipc:///a", "ipc:///b"))
    error = unreachable(choice, "there is no such socket", 0.0)
    assert "ipc:///a" in error.message
    assert error.message.count("ipc:///b") == 1
    assert error.details["tried"] == ["ipc:///a", "ipc:///b"]
    assert "offloadd" in error.hint
