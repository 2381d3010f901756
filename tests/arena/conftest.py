"""What tests of the arena share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Mapped = Callable[[], list[str]]


def _mapped_memfds() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:offloadd" in line]


@pytest.fixture
def mapped() -> Mapped:
    """Segments that this process has mapped since the test began: other tests may keep theirs."""
    before = set(_mapped_memfds())
    return lambda: [line for line in _mapped_memfds() if line not in before]
