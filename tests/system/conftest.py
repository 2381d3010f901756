"""One daemon for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from system.daemons import Daemon, running_daemon


@pytest.fixture(scope="session")
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path leaves room for a socket's name (Linux allows 107 bytes)."""
    return tmp_path_factory.mktemp("d")


@pytest.fixture(scope="session")
def daemon(short_tmp: Path) -> Iterator[Daemon]:
    """A ready daemon that hosts `shapes`."""
    with running_daemon(short_tmp / "shared") as daemon:
        yield daemon
