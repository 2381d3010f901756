"""Whatever a peer sends: the daemon lives, its memory stays flat, and good clients are served."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from client.stopping import wait_until_stopped
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from system.daemons import Daemon, running_daemon
from system.hostile import REQUEST, Stranger, random_frames, served_meanwhile

from offload_client import Client
from offload_protocol import codec
from offload_protocol.errors import ProtocolMismatch, TimedOut
from offload_protocol.messages import PROTOCOL_VERSION, Error, Hello, Submit

pytestmark = pytest.mark.system

FRAMES = 2_000
GROWTH_BYTES = 32 << 20
NOOP = '[[models]]\nname = "noop"\nsource = "builtin:noop"\n'


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("fuzz"), config=NOOP) as daemon:
        with daemon.client() as client:
            client.load("noop", timeout_s=90)
        yield daemon


def rss_bytes(daemon: Daemon) -> int:
    return int(psutil.Process(daemon.process.pid).memory_info().rss)


def test_case_36_requests_of_any_shape_are_answered_and_leave_nothing_behind(
    daemon: Daemon,
) -> None:
    stranger, sent = Stranger(daemon.endpoint, greets=True), itertools.count()

    @settings(
        max_examples=FRAMES // 4,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(REQUEST, st.lists(st.binary(max_size=100), max_size=3))
    def say(request: dict[str, Any], frames: list[bytes]) -> None:
        next(sent)
        stranger.say(msgspec.msgpack.encode(request), *frames)

    before = rss_bytes(daemon)
    with served_meanwhile(daemon.endpoint):
        say()
    stranger.close()
    assert next(sent) == FRAMES // 4
    assert daemon.process.poll() is None
    assert rss_bytes(daemon) - before < GROWTH_BYTES


def test_case_36_random_bytes_are_survived_and_counted(daemon: Daemon) -> None:
    chance = random.Random(36)
    strangers = [Stranger(daemon.endpoint, greets=greets) for greets in (True, False)]
    before = rss_bytes(daemon)
    with served_meanwhile(daemon.endpoint):
        for _ in range(FRAMES):
            chance.choice(strangers).say(*random_frames(chance))
    for stranger in strangers:
        stranger.close()
    with daemon.client() as client:
        assert client.stats()["daemon"]["protocol_errors_total"] > FRAMES // 2
    assert daemon.process.poll() is None
    assert rss_bytes(daemon) - before < GROWTH_BYTES


def test_case_38_versions_of_yesterday_and_tomorrow_are_refused(daemon: Daemon) -> None:
    with zmq.Context() as context:
        for version in (0, 99):
            socket: Any = context.socket(zmq.DEALER)
            with socket:
                socket.linger = 0
                socket.connect(daemon.endpoint)
                socket.send(codec.encode(Hello(rid=1, version=version, session="other")))
                answer = codec.decode_answer(socket.recv())
            assert isinstance(answer, Error)
            error = codec.to_exception(answer.error)
            assert isinstance(error, ProtocolMismatch)
            assert error.details == {"client": version, "daemon": PROTOCOL_VERSION}


def test_a_second_peer_with_the_same_routing_id_takes_nothing_from_the_first(
    daemon: Daemon,
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    sockets: list[Any] = []
    for session in ("first", "second"):
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.ROUTING_ID, b"the same")
        socket.connect(daemon.endpoint)
        socket.send(codec.encode(Hello(rid=1, version=PROTOCOL_VERSION, session=session)))
        sockets.append(socket)
        if session == "first":
            socket.recv()
    submit = Submit(rid=2, job="mine", model="noop")
    sockets[0].send(codec.encode(submit))
    while b"finished" not in sockets[0].recv():
        pass
    assert not sockets[1].poll(200)
    context.destroy(linger=0)


SLOW_CLIENT = """
import sys
from offload_client import Client
client = Client(sys.argv[1])
job = client.submit("noop", job_id=sys.argv[2])
print("submitted", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_case_33_a_client_that_dies_or_stands_still_disturbs_nobody(
    daemon: Daemon, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", SLOW_CLIENT, daemon.endpoint]
    victims = [
        subprocess.Popen([*command, f"job-{number.name}-{index}"], stdin=PIPE, stdout=PIPE)
        for index in range(3)
    ]
    try:
        for victim in victims:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"submitted\n"
            victim.send_signal(number)
        with served_meanwhile(daemon.endpoint):
            time.sleep(1.0)
        with daemon.client() as client:
            # Another process of the same user comes for the result.
            assert client.job(f"job-{number.name}-0").result(timeout_s=20).outputs == {}
    finally:
        for victim in victims:
            victim.kill()
            victim.communicate()


def test_a_stopped_daemon_is_said_to_be_so(tmp_path: Path) -> None:
    with running_daemon(tmp_path, ready=False) as daemon:
        deadline = time.monotonic() + 30
        while not Path(daemon.endpoint.removeprefix("ipc://")).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with Client(daemon.endpoint, connect_timeout_s=20) as client:
            client.ping()
            daemon.process.send_signal(signal.SIGSTOP)
            wait_until_stopped(daemon.process.pid)
            try:
                start = time.monotonic()
                with pytest.raises(TimedOut, match="stopped or overloaded"):
                    client.stats(timeout_s=1.0)
                assert time.monotonic() - start < 3.0
            finally:
                daemon.process.send_signal(signal.SIGCONT)
            client.ping(timeout_s=20)
