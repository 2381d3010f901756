"""The import layers are checked by something that notices when they are broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installation.plain_install import REPOSITORY

ROOMS = ("client", "shared", "daemon")


@pytest.mark.parametrize(
    ("module", "forbidden", "contract"),
    [
        ("client/offload_client/__init__.py", "torch", "The client needs neither"),
        ("client/offload_client/__init__.py", "offloadd.channel", "The client needs neither"),
        ("shared/offload_protocol/codec.py", "offload_client", "The command line stands on"),
        ("daemon/offloadd/control/__init__.py", "diffusers", "The control plane can't import"),
        ("daemon/offloadd/control/__init__.py", "offloadd.worker", "The control plane can't"),
        ("daemon/offloadd/store/__init__.py", "offloadd.hosting", "The device plane imports down"),
        ("daemon/offloadd/worker/__init__.py", "offloadd.control", "The device plane talks"),
        ("daemon/offloadd/channel/__init__.py", "offload_client", "The daemon never imports"),
    ],
)
def test_an_import_across_the_layers_is_refused(
    module: str, forbidden: str, contract: str, tmp_path: Path
) -> None:
    for room in ROOMS:
        shutil.copytree(REPOSITORY / room, tmp_path / room, ignore=_only_code)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as code:
        code.write(f"\nimport {forbidden}\n")
    assert f"{contract}" in _broken(tmp_path)


def _only_code(directory: str, names: list[str]) -> set[str]:
    return {
        name for name in names if not name.endswith(".py") and not Path(directory, name).is_dir()
    }


def _broken(checkout: Path) -> str:
    """The contracts that the checker calls broken, one a line."""
    import_path = ":".join(str(checkout / room) for room in ROOMS)
    code = (
        f"import sys; sys.path[:0] = {import_path.split(':')!r};"
        "from importlinter.cli import lint_imports_command;"
        "lint_imports_command(['--no-cache', '--no-logo'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if line.endswith("BROKEN"))
