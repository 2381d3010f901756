"""Builds the wheel, and installs it the way a user of the light client does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class PlainInstall:
    """A virtual environment that holds `pip install offloadd` and nothing else."""

    directory: Path

    def run(self, *command: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run one of its programs, away from the checkout, without the caller's environment."""
        program, *arguments = command
        return subprocess.run(
            [self.directory / "bin" / program, *arguments],
            cwd=self.directory,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.directory), "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def python(self, code: str) -> str:
        """What the code prints; it has to end well."""
        done = self.run("python", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout


def build(target: str, directory: Path, source: Path = REPOSITORY) -> Path:
    """Build the `wheel` or `sdist` of `source` into the directory; needs no network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = directory.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[target])
    return built


def install(wheel: Path, directory: Path) -> PlainInstall:
    """Make the environment with this interpreter, and install the wheel with its dependencies."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", directory], check=True, timeout=60
    )
    # This environment's pip installs into the other one, which stays without a pip of its own.
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python")]
    subprocess.run(
        [*pip, "install", "--quiet", "--disable-pip-version-check", str(wheel)],
        check=True,
        capture_output=True,
        timeout=240,
    )
    return PlainInstall(directory)
