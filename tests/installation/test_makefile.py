"""`make` sets a checkout up by itself, and says clearly why where it can't."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from installation.plain_install import REPOSITORY


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with no more of the repository than make needs to begin."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def test_make_alone_lists_its_targets(checkout: Path) -> None:
    done = _make(checkout)
    assert done.returncode == 0
    assert "make demo" in done.stdout
    assert "make test" in done.stdout


@pytest.mark.parametrize("target", ["demo", "test"])
def test_an_old_python_is_refused_in_one_sentence(checkout: Path, target: str) -> None:
    old = checkout / "old-python"
    old.write_text('#!/bin/sh\ntest "$1" = --version && echo Python 3.9.18\nexit 1\n')
    old.chmod(0o755)
    done = _make(checkout, target, f"PYTHON={old}")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.18" in done.stderr
    assert not (checkout / ".venv").exists()


def test_the_cpu_build_of_torch_is_the_default_and_another_one_can_be_said(
    checkout: Path,
) -> None:
    assert _torch_lines(checkout) == [
        "--extra-index-url https://download.pytorch.org/whl/cpu",
        "torch==2.13.0",
    ]
    assert _torch_lines(checkout, "TORCH=torch>=2.8")[1:] == ["torch>=2.8"]
    index = "TORCH_INDEX=https://example.org/rocm"
    assert _torch_lines(checkout, "TORCH=torch", index)[1:] == [
        "--extra-index-url https://example.org/rocm",
        "torch",
    ]


def test_a_chosen_torch_holds_until_another_is_chosen(checkout: Path) -> None:
    chosen = _torch_lines(checkout, "TORCH=torch>=2.8")
    assert _torch_lines(checkout) == chosen
    assert _torch_lines(checkout, "TORCH=torch==2.9.0")[1:] == ["torch==2.9.0"]


def test_saying_the_same_torch_again_leaves_its_file_alone(checkout: Path) -> None:
    _torch_lines(checkout)
    before = (checkout / ".venv/.torch-wanted").stat().st_mtime_ns
    _torch_lines(checkout)
    assert (checkout / ".venv/.torch-wanted").stat().st_mtime_ns == before


def _torch_lines(checkout: Path, *variables: str) -> list[str]:
    environment = checkout / ".venv/pyvenv.cfg"
    environment.parent.mkdir(exist_ok=True)
    environment.touch()
    done = _make(checkout, ".venv/.torch-wanted", *variables)
    assert done.returncode == 0, done.stderr
    return (checkout / ".venv/.torch-wanted").read_text().splitlines()


def _make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=checkout,
        # Run from `make test`, this make must not take itself for a part of that one.
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
