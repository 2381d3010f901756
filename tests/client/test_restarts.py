"""Daemons that are killed, stopped and started again while clients wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client.conftest import Twin
from client.peer import Caller, Peer, ignore, info_of
from client.stopping import wait_until_stopped

from offload_client import Client, Job, TimedOut, Unreachable
from offload_protocol.messages import Submit

ROOT = Path(__file__).resolve().parents[2]


class Daemon:
    """A peer process at one endpoint."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"ipc://{path}"
        self._process: subprocess.Popen[str] | None = None

    def start(self, instance: str, job_s: float = 0.0) -> None:
        script = ROOT / "tests" / "client" / "daemon_process.py"
        self._process = subprocess.Popen(
            [sys.executable, str(script), self.endpoint, instance, str(job_s)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            wait_until_stopped(self._process.pid)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture
def daemon(socket_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(socket_path)
    yield daemon
    daemon.kill()


def later(delay_s: float, act: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        time.sleep(delay_s)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_job_outlives_a_killed_daemon_and_its_result_arrives(twin: Twin, daemon: Daemon) -> None:
    daemon.start("first", job_s=60)
    client = twin.client(daemon.endpoint)

    def restart() -> None:
        daemon.kill()
        time.sleep(0.3)
        daemon.start("second")

    thread = later(0.3, restart)
    assert twin.do(client.generate("shapes", "x", timeout_s=30)).seed == 7
    thread.join()


def test_a_question_under_way_is_answered_by_the_next_daemon(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    first = start_peer(stats=ignore)

    def restart() -> None:
        first.stop()
        start_peer("second", stats=lambda caller, r: caller.reply(r, {"from": "second"}))

    thread = later(0.2, restart)
    assert twin.do(twin.client(first.endpoint).stats()) == {"from": "second"}
    thread.join()


def test_a_job_is_said_again_with_its_own_id_after_a_restart(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    def hold(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request, "running"))

    first = start_peer(submit=hold)
    job = twin.do(twin.client(first.endpoint).submit("shapes", "x", seed=5))
    first.stop()
    second = start_peer("second")
    assert twin.do(job.result(timeout_s=10)).seed == 7
    (again,) = (request for request in second.heard if isinstance(request, Submit))
    assert (again.job, again.seed, again.arguments) == (job.id, 5, {"prompt": "x"})


def test_a_daemon_that_forgot_its_clients_is_greeted_again(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer()

    def forgot(caller: Caller, request: Any) -> None:
        peer.answers.clear()
        caller.refuse(request, "protocol_mismatch", hello_required=True)

    client = twin.client(peer.endpoint)
    twin.do(client.ping())
    peer.answers["stats"] = forgot
    assert twin.do(client.stats()) == {}
    assert peer.ops() == ["hello", "ping", "stats", "hello", "stats"]


def test_an_idle_client_notices_a_restart_at_its_next_call(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    first = start_peer()
    client = twin.client(first.endpoint)
    twin.do(client.ping())
    first.stop()
    second = start_peer("second")
    twin.do(client.ping())
    assert second.ops() == ["hello", "ping"]


def test_a_call_after_the_daemon_went_away_says_so_within_the_connect_timeout(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    first = start_peer()
    client = twin.client(first.endpoint, connect_timeout_s=0.5)
    twin.do(client.ping())
    first.stop()
    time.sleep(0.1)
    started = time.monotonic()
    with pytest.raises(Unreachable, match="nobody listens"):
        twin.do(client.generate("shapes", "x"))
    assert time.monotonic() - started < 2


def test_work_under_way_is_given_up_when_no_daemon_comes_back(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    def hold(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request, "running"))

    first = start_peer(submit=hold)
    client = twin.client(first.endpoint, reconnect_timeout_s=0.5)
    job = twin.do(client.submit("shapes", "x"))
    first.stop()
    with pytest.raises(Unreachable, match="nobody listens"):
        twin.do(job.result())


def test_a_stopped_daemon_is_unreachable_for_a_new_client(twin: Twin, daemon: Daemon) -> None:
    daemon.start("first")
    daemon.signal(signal.SIGSTOP)
    client = twin.client(daemon.endpoint, connect_timeout_s=0.5)
    started = time.monotonic()
    # Which sentence it is depends on whether the transport had shaken hands before the stop.
    with pytest.raises(Unreachable, match=r"(is|may be) stopped"):
        twin.do(client.stats())
    assert time.monotonic() - started < 10
    daemon.signal(signal.SIGCONT)
    # Half a second suffices to see that nobody answers, and not always for who goes on to answer.
    twin.do(twin.client(daemon.endpoint, connect_timeout_s=20.0).connect())


def test_a_daemon_stopped_in_the_middle_times_out_and_says_so(twin: Twin, daemon: Daemon) -> None:
    daemon.start("first", job_s=60)
    client = twin.client(daemon.endpoint)
    job = twin.do(client.submit("shapes", "x"))
    daemon.signal(signal.SIGSTOP)
    with pytest.raises(TimedOut, match=r"nothing was heard from the daemon for .*stopped"):
        twin.do(job.result(timeout_s=1.2))
    daemon.signal(signal.SIGCONT)


def test_a_client_that_was_stopped_goes_on(daemon: Daemon) -> None:
    daemon.start("first")
    code = (
        "import sys\nfrom offload_client import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    client.ping(); print('ready', flush=True); sys.stdin.readline()\n"
        "    print(client.generate('shapes', 'x', timeout_s=20).seed)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, daemon.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGSTOP)
    daemon.kill()
    daemon.start("second")
    child.send_signal(signal.SIGCONT)
    out, _ = child.communicate("\n", timeout=30)
    assert out == "7\n"


def test_the_result_of_an_abandoned_wait_arrives_after_a_restart(
    start_peer: Callable[..., Peer],
) -> None:
    def hold(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request, "running"))

    first = start_peer(submit=hold)
    with Client(first.endpoint, reconnect_timeout_s=0.3) as client:
        job: Job = client.submit("shapes", "x")
        first.stop()
        with pytest.raises(Unreachable):
            job.result()
        start_peer("second")
        assert job.result(timeout_s=10).seed == 7
