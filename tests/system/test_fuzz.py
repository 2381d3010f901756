"""Whatever a peer sends: the daemon lives, its memory stays flat, and good clients are served."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from system.daemons import Daemon, running_daemon

from offload_client import Client
from offload_protocol import codec
from offload_protocol.errors import OffloadError, ProtocolMismatch, TimedOut
from offload_protocol.messages import PROTOCOL_VERSION, REQUESTS, Error, Hello, Submit

pytestmark = pytest.mark.system

FRAMES = 2_000
GROWTH_BYTES = 32 << 20
SLOWEST_PING_S = 5.0
NOOP = '[[models]]\nname = "noop"\nsource = "builtin:noop"\n'

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=50)
    | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FIELDS = sorted({name for kind in REQUESTS.values() for name in kind.__struct_fields__})
REFERENCES = st.fixed_dictionaries(
    {"$array": PLAIN, "dtype": st.sampled_from(["uint8", "float64", "none"]), "shape": PLAIN}
)
REQUEST = st.builds(
    lambda op, rid, fields: {"op": op, "rid": rid, **fields},
    # `drain` and the models are an administrator's, which this user is, to change for everybody.
    st.sampled_from(sorted(set(REQUESTS) - {"drain", "load", "unload", "pin"})) | st.text(),
    st.integers(0, 2**32) | PLAIN,
    st.dictionaries(
        st.sampled_from([name for name in FIELDS if name != "rid"]), PLAIN | REFERENCES, max_size=6
    ),
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("fuzz"), config=NOOP) as daemon:
        with daemon.client() as client:
            client.load("noop", timeout_s=90)
        yield daemon


class Stranger:
    """A DEALER that says anything, and reads what it is answered so that it is not held back."""

    def __init__(self, endpoint: str, *, greets: bool) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        if greets:
            self.say(codec.encode(Hello(rid=0, version=PROTOCOL_VERSION, session="stranger")))

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)
        while self._socket.poll(0):
            self._socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def served_meanwhile(daemon: Daemon) -> Iterator[None]:
    """A good client pings and draws all the time, and each of its calls has to be answered."""
    over, failures, longest_s = threading.Event(), [], [0.0]

    def serve() -> None:
        try:
            with daemon.client(timeout_s=30) as client:
                while not over.is_set():
                    longest_s[0] = max(longest_s[0], client.ping())
                    client.generate("noop")
        except OffloadError as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failures
    assert longest_s[0] < SLOWEST_PING_S


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
    with served_meanwhile(daemon):
        say()
    stranger.close()
    assert next(sent) == FRAMES // 4
    assert daemon.process.poll() is None
    assert rss_bytes(daemon) - before < GROWTH_BYTES


def test_case_36_random_bytes_are_survived_and_counted(daemon: Daemon) -> None:
    chance = random.Random(36)
    strangers = [Stranger(daemon.endpoint, greets=greets) for greets in (True, False)]
    before = rss_bytes(daemon)
    with served_meanwhile(daemon):
        for _ in range(FRAMES):
            parts = [chance.randbytes(chance.choice((0, 1, 9, 200, 5000))) for _ in range(3)]
            chance.choice(strangers).say(*parts[: chance.randint(1, 3)])
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
        with served_meanwhile(daemon):
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
            try:
                start = time.monotonic()
                with pytest.raises(TimedOut, match="stopped or overloaded"):
                    client.stats(timeout_s=1.0)
                assert time.monotonic() - start < 3.0
            finally:
                daemon.process.send_signal(signal.SIGCONT)
            client.ping(timeout_s=20)
