"""`offloadctl keygen`: what it writes, who can read it, and what it refuses."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from offload_protocol.errors import InvalidRequest
from offload_protocol.keys import client_keys, read_pair, read_public


def keygen(*words: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offloadctl", "keygen", *words],
        capture_output=True,
        text=True,
        timeout=60,
        umask=umask,
    )


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_pair_is_written_that_curve_takes_and_only_its_owner_can_read(
    tmp_path: Path, umask: int
) -> None:
    done = keygen("anna", "--directory", str(tmp_path), umask=umask)
    assert done.returncode == 0, done.stderr
    pair = read_pair(tmp_path / "anna.key")
    assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
    assert read_public(tmp_path / "anna.pub") == pair.public
    assert stat.S_IMODE((tmp_path / "anna.key").stat().st_mode) == 0o600
    assert pair.secret not in (tmp_path / "anna.pub").read_text()
    assert pair.public in done.stdout
    assert pair.secret not in done.stdout + repr(pair)


def test_json_names_the_files_and_the_public_key_alone(tmp_path: Path) -> None:
    data = json.loads(keygen("--json", "--directory", str(tmp_path)).stdout)
    pair = read_pair(Path(data["key_file"]))
    assert data == {
        "public": pair.public,
        "key_file": str(tmp_path / "client.key"),
        "public_file": str(tmp_path / "client.pub"),
    }


def test_keys_that_are_there_are_not_written_over(tmp_path: Path) -> None:
    keygen("--directory", str(tmp_path))
    before = (tmp_path / "client.key").read_bytes()
    done = keygen("--directory", str(tmp_path))
    assert done.returncode == 1
    assert "client.key is there already" in done.stderr
    assert (tmp_path / "client.key").read_bytes() == before


@pytest.mark.parametrize("name", ["../up", "", ".hidden", "a b"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    done = keygen(name, "--directory", str(tmp_path))
    assert done.returncode == 1
    assert "is not a name for a key" in done.stderr
    assert not list(tmp_path.iterdir())


def test_clients_take_their_keys_from_arguments_then_environment_then_home(tmp_path: Path) -> None:
    home = tmp_path / "offloadd"
    for directory, name in ((home, "client"), (home, "server"), (tmp_path, "other")):
        keygen(name, "--directory", str(directory))
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    at_home = client_keys(None, None, environ)
    assert at_home.own == read_pair(home / "client.key")
    assert at_home.server == read_public(home / "server.pub")
    other = read_pair(tmp_path / "other.key")
    environ |= {
        "OFFLOADD_KEY_FILE": str(tmp_path / "other.key"),
        "OFFLOADD_SERVER_KEY": other.public,
    }
    assert client_keys(None, None, environ).own == other
    assert client_keys(None, None, environ).server == other.public
    given = client_keys(home / "client.key", home / "server.pub", environ)
    assert given == at_home


def test_a_file_whose_path_looks_like_a_key_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("client", "server"):
        keygen(name, "--directory", str(tmp_path))
    path = Path("k" * 36 + ".pub")
    assert len(str(path)) == 40
    (tmp_path / "server.pub").rename(path)
    assert client_keys("client.key", path, {}).server == read_public(path)


def test_files_that_hold_no_key_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.key"
    for text in ("", 'public = "short"', "[[", "public = 1", "\0"):
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(InvalidRequest, match=r"a\.key"):
            read_pair(file)
    file.write_bytes(os.urandom(100_000))
    with pytest.raises(InvalidRequest, match=r"a\.key"):
        read_public(file)
    with pytest.raises(InvalidRequest, match="No such file"):
        read_pair(tmp_path / "none.key")
