"""The worker computes well beside programs that want the same cores."""

from __future__ import annotations

from pathlib import Path

import pytest
from system.daemons import running_daemon

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")]
)
def test_the_workers_threads_do_not_spin_unless_somebody_wants_it(
    short_tmp: Path, chosen: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    # OpenMP says by itself, when torch loads it, what it does.
    environment = {"OMP_DISPLAY_ENV": "true", **chosen}
    with running_daemon(short_tmp / expected, environment=environment) as daemon:
        assert f"OMP_WAIT_POLICY = '{expected}'" in daemon.log.read_text()
