"""One daemon an endpoint, and a socket that is never wider open than it was meant to be."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_protocol.errors import InvalidRequest
from offloadd.control.clients.listener import Access, Listener, listen
from offloadd.control.lock import EndpointLock, EndpointTaken


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/run/offloadd.sock"


def path_of(listener: Listener) -> Path:
    assert listener.path is not None
    return listener.path


@pytest.fixture
def listener(endpoint: str) -> Iterator[Listener]:
    listener = listen(endpoint, Access())
    yield listener
    listener.socket.close()
    listener.remove()


def test_case_39_a_second_daemon_is_refused_with_the_pid_of_the_first(
    listener: Listener, endpoint: str
) -> None:
    with pytest.raises(EndpointTaken, match=f"process {os.getpid()} ") as caught:
        listen(endpoint, Access())
    assert caught.value.details == {"pid": os.getpid()}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path_of(listener)))


def test_case_39_a_dead_daemons_socket_is_cleaned_away(endpoint: str) -> None:
    died = (
        "import sys, os\n"
        "from offloadd.control.clients.listener import Access, listen\n"
        "listen(sys.argv[1], Access())\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", died, endpoint], check=False)
    listener = listen(endpoint, Access())
    assert path_of(listener).is_socket()
    listener.socket.close()
    listener.remove()


def test_removing_leaves_nothing_behind(tmp_path: Path, endpoint: str) -> None:
    listener = listen(endpoint, Access())
    listener.socket.close()
    listener.remove()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_lock_whose_file_was_removed_is_not_taken_for_ours(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = EndpointLock.acquire(path)
    waiting = os.open(path, os.O_RDWR)
    first.release()
    # Whoever opened the file before it was removed may lock it, but it guards nothing any more.
    fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = EndpointLock.acquire(path)
    with pytest.raises(EndpointTaken):
        EndpointLock.acquire(path)
    second.release()
    os.close(waiting)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_case_58_the_socket_has_the_configured_mode_under_every_umask(
    endpoint: str, umask: int
) -> None:
    before = os.umask(umask)
    try:
        listener = listen(endpoint, Access(mode=0o660, group_id=os.getgid()))
    finally:
        os.umask(before)
    state = path_of(listener).stat()
    directory = path_of(listener).parent.stat()
    listener.socket.close()
    listener.remove()
    assert stat.S_IMODE(state.st_mode) == 0o660
    assert state.st_gid == os.getgid()
    assert stat.S_IMODE(directory.st_mode) == 0o750


def test_case_58_by_default_only_the_daemons_user_may_connect(listener: Listener) -> None:
    assert stat.S_IMODE(path_of(listener).stat().st_mode) == 0o600
    assert stat.S_IMODE(path_of(listener).parent.stat().st_mode) == 0o700


def test_case_58_the_socket_is_closed_to_others_from_its_first_moment(tmp_path: Path) -> None:
    # The mode of the descriptor, not a later chmod, decides: that is what this kernel must do.
    before = os.umask(0)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            os.fchmod(listening.fileno(), 0o600)
            listening.bind(str(tmp_path / "s"))
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_directory_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(InvalidRequest, match="written by everybody"):
        listen(f"ipc://{directory}/s", Access())


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("text")
    with pytest.raises(InvalidRequest, match="is no socket"):
        listen(f"ipc://{path}", Access())
    assert path.read_text() == "text"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_used_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"cannot use the endpoint .*/proc"):
        listen("ipc:///proc/offloadd/s", Access())


def test_a_tcp_address_of_another_machine_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"cannot listen on tcp://192\.0\.2\.1:5555"):
        listen("tcp://192.0.2.1:5555", Access())
