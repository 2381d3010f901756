"""Over tcp nobody is heard without an allowed key, and who holds one is known by it alone.

A daemon with an ipc and a tcp endpoint on the loopback, and the real client; the daemon's own loop
runs in a thread of its own, since the client blocks.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from control.conftest import MODELS, QUICK, WORKER

from offload_client import Client, Unauthorized, UnknownJob, Unreachable
from offload_protocol.errors import InvalidRequest
from offload_protocol.keys import KeyPair, write_pair
from offloadd.config import Config, DaemonSection, RemoteSection
from offloadd.control.clients.allow_list import STALE_S, AllowList
from offloadd.control.clients.entrances import close_entrances, open_entrances, read_keys
from offloadd.control.clients.listener import Access
from offloadd.control.clients.roles import Roles
from offloadd.control.lock import EndpointTaken
from offloadd.control.server import Server, Setting


def new_pair() -> KeyPair:
    public, secret = (half.decode() for half in zmq.curve_keypair())
    return KeyPair(public, secret)


@dataclass
class Site:
    """A daemon's keys and directories, and its two endpoints."""

    directory: Path
    local: str
    remote: str
    server: KeyPair

    @property
    def clients(self) -> Path:
        return self.directory / "clients"

    def allow(self, name: str, role: str) -> Path:
        """A client's key file, whose public half is allowed."""
        kept, public = write_pair(new_pair(), self.directory / "their", name)
        public.rename(self.clients / role / public.name)
        return kept

    def client(self, key_file: Path, server_key: str | None = None) -> Client:
        return Client(
            self.remote,
            key_file=key_file,
            server_key=server_key or self.server.public,
            connect_timeout_s=3.0,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a thread until left."""
        started: list[tuple[asyncio.AbstractEventLoop, Server]] = []
        is_up = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started, is_up)))
        thread.start()
        assert is_up.wait(20)
        try:
            yield
        finally:
            loop, server = started[0]
            loop.call_soon_threadsafe(server.stop)
            thread.join()

    async def _serve(
        self, started: list[tuple[asyncio.AbstractEventLoop, Server]], is_up: threading.Event
    ) -> None:
        remote = RemoteSection(
            endpoint=self.remote,
            key_file=str(self.directory / "server.key"),
            clients=str(self.clients),
        )
        daemon = DaemonSection(endpoint=self.local, device="cpu")
        config = Config(daemon=daemon, remote=remote, models=MODELS)
        keys = read_keys(remote, time.monotonic)
        assert keys is not None
        entrances = open_entrances(daemon, remote, Access(), keys)
        setting = Setting(
            version="0.0.0",
            entrances=entrances,
            state_dir=self.directory,
            roles=Roles(frozenset({os.getuid()}), keys=keys.allowed),
            environ=dict(os.environ),
            worker_command=WORKER,
            patience=QUICK,
        )
        server = Server(config, setting)
        started.append((asyncio.get_running_loop(), server))
        is_up.set()
        try:
            await server.run()
        finally:
            close_entrances(entrances)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pair = new_pair()
    write_pair(pair, tmp_path, "server")
    for role in ("use", "administrate"):
        (tmp_path / "clients" / role).mkdir(parents=True)
    return Site(tmp_path, f"ipc://{tmp_path}/s.sock", f"tcp://127.0.0.1:{port}", pair)


def test_an_allowed_key_draws_and_administers_as_its_directory_says(site: Site) -> None:
    user, chief = site.allow("anna", "use"), site.allow("chief", "administrate")
    with site.running():
        with site.client(user) as client:
            assert client.generate("good", "echo", seed=3).seed == 3
            assert [row["user"] for row in client.stats()["clients"]] == ["key anna"]
            for refused in (
                lambda: client.load("mine", "/good"),
                client.drain,
                lambda: client.pin("good"),
                lambda: client.unload("good"),
            ):
                with pytest.raises(Unauthorized, match="key anna is none"):
                    refused()
        with site.client(chief) as client:
            assert client.load("mine", "/good").state == "ready"
            assert client.stats()["clients"]


def test_an_unknown_key_is_told_so_and_added_it_is_let_in(site: Site) -> None:
    key_file, public = write_pair(new_pair(), site.directory / "their", "bob")
    with site.running():
        with pytest.raises(Unauthorized, match="does not know this client's key"):
            site.client(key_file).stats()
        public.rename(site.clients / "use" / public.name)
        with site.client(key_file) as client:
            assert client.ping() > 0


def test_a_wrong_key_of_the_daemon_is_suspected_within_the_connect_timeout(site: Site) -> None:
    key_file = site.allow("anna", "use")
    with site.running():
        started = time.monotonic()
        with pytest.raises(Unreachable, match="another daemon than the one whose public key"):
            site.client(key_file, new_pair().public).stats()
        assert time.monotonic() - started < 20


def test_without_keys_the_client_says_which_file_is_missing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(site.directory / "config"))
    monkeypatch.delenv("OFFLOADD_KEY_FILE", raising=False)
    with (
        site.running(),
        pytest.raises(InvalidRequest, match=r"config/offloadd/client\.key") as caught,
    ):
        Client(site.remote).stats()
    assert "keygen" in caught.value.hint


def test_a_peer_that_speaks_no_curve_is_not_heard(site: Site) -> None:
    with site.running(), zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        with plain.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) as monitor:
            plain.connect(site.remote)
            plain.send(b"anything")
            assert monitor.poll(10_000)
            plain.disable_monitor()
        assert not plain.poll(100)
        with Client(site.local) as local:
            assert local.stats()["daemon"]["protocol_errors_total"] == 0


def test_two_keys_and_a_uid_do_not_see_each_others_jobs_even_with_one_session(site: Site) -> None:
    first, second = site.allow("anna", "use"), site.allow("bob", "use")
    with site.running(), site.client(first) as anna, site.client(second) as bob:
        bob._core._identity = anna._core._identity
        anna.submit("good", "echo", job_id="same", detached=True).result()
        with pytest.raises(UnknownJob):
            bob.cancel("same")
        with pytest.raises(UnknownJob):
            bob.job("same")
        assert bob.jobs() == []
        bob.submit("good", "hang", job_id="other", detached=True)
        assert [row.job for row in anna.jobs()] == ["same"]
        assert {row["user"] for row in anna.stats()["clients"]} == {"key anna"}
        with Client(site.local) as administrator:
            assert {row.job for row in administrator.jobs()} == {"same", "other"}
            administrator.cancel("other")


def test_a_job_belongs_to_its_key_across_a_restart_of_the_daemon(site: Site) -> None:
    owner, stranger = site.allow("anna", "use"), site.allow("bob", "use")
    with site.running(), site.client(owner) as client:
        client.submit("good", "echo", job_id="mine", seed=5, detached=True)
        while client.jobs()[0].state != "done":
            time.sleep(0.02)
    # A file's name is for people; what is owned goes by the key.
    (site.clients / "use" / "anna.pub").rename(site.clients / "use" / "renamed.pub")
    with site.running():
        with site.client(stranger) as client, pytest.raises(UnknownJob):
            client.job("mine")
        with site.client(owner) as client:
            assert client.job("mine").result().seed == 5


def ping_for(client: Client, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        client.ping()
        time.sleep(0.05)


def test_a_removed_key_is_out_within_two_seconds_and_in_again_when_it_is_back(site: Site) -> None:
    key_file = site.allow("anna", "use")
    with site.running(), site.client(key_file) as client:
        client.ping()
        public = site.clients / "use" / "anna.pub"
        text = public.read_text()
        public.unlink()
        with pytest.raises(Unauthorized, match="no longer allowed"):
            ping_for(client, STALE_S + 20)
        with pytest.raises(Unauthorized, match="no longer allowed"):
            client.ping()
        # Once it is allowed again, the same client goes on.
        public.write_text(text)
        deadline = time.monotonic() + 20
        while True:
            try:
                assert client.generate("good", "echo", seed=5).seed == 5
                break
            except Unauthorized:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_tcp_is_refused_without_keys(site: Site) -> None:
    for daemon, remote in (
        (DaemonSection(endpoint=site.remote), RemoteSection()),
        (DaemonSection(endpoint=site.local), RemoteSection(endpoint=site.remote)),
    ):
        with pytest.raises(InvalidRequest, match="not served without keys") as caught:
            open_entrances(daemon, remote, Access(), None)
        assert "keygen" in caught.value.hint
    assert not Path(site.local.removeprefix("ipc://")).exists()


@pytest.mark.parametrize("missing", ["key_file", "clients"])
def test_half_the_keys_are_refused_with_the_name_of_the_other(site: Site, missing: str) -> None:
    named = {"key_file": str(site.directory / "server.key"), "clients": str(site.clients)}
    del named[missing]
    with pytest.raises(InvalidRequest, match=f"remote.{missing} is not set"):
        read_keys(RemoteSection(**named), time.monotonic)


def test_a_secret_key_that_others_can_read_is_refused(site: Site) -> None:
    file = site.directory / "server.key"
    file.chmod(0o644)
    with pytest.raises(InvalidRequest, match="can be read or changed by others"):
        read_keys(RemoteSection(key_file=str(file), clients=str(site.clients)), time.monotonic)


def test_a_port_that_is_taken_is_refused(site: Site) -> None:
    keys = read_keys(
        RemoteSection(key_file=str(site.directory / "server.key"), clients=str(site.clients)),
        time.monotonic,
    )
    daemon = DaemonSection(endpoint=site.remote)
    with (
        socket.create_server(("127.0.0.1", int(site.remote.rpartition(":")[2]))),
        pytest.raises(EndpointTaken, match="already listens"),
    ):
        open_entrances(daemon, RemoteSection(), Access(), keys)


def test_a_key_in_both_directories_administers_and_rubbish_is_left_out(tmp_path: Path) -> None:
    pair, now = new_pair(), [0.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    for role in ("use", "administrate"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "a.pub").write_text(f'public = "{pair.public}"\n')
    (tmp_path / "use" / "b.pub").write_text("<html>")
    (tmp_path / "use" / "c.pub").write_text("public = 3")
    keys = AllowList(tmp_path, clock)
    found = keys.find(pair.public)
    assert found is not None
    assert found.role == "administrate"
    assert len(keys) == 1
    (tmp_path / "administrate" / "a.pub").unlink()
    now[0] = STALE_S
    found = keys.find(pair.public)
    assert found is not None
    assert found.role == "use"
