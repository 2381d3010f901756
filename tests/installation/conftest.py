"""The wheel and its plain installation, made once for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest
from installation.plain_install import PlainInstall, build, install


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainInstall:
    """An environment with `pip install offloadd`, no extra."""
    return install(wheel, tmp_path_factory.mktemp("plain") / "venv")
