"""What `make demo` runs shows the whole way of a picture, or says in a sentence why it can't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from judge_shapes import judge, parse_prompt

pytestmark = pytest.mark.system

DEMO = Path(__file__).parents[2] / "tools" / "demo.py"


def test_the_demo_ends_with_statistics_and_the_path_of_a_picture_that_fits(tmp_path: Path) -> None:
    done = _demo(tmp_path / "pictures")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== offloadctl stats" in done.stdout
    file = Path(done.stdout.splitlines()[-1])
    assert judge(_picture(file), parse_prompt("a red circle on a white background")).fits
    assert len(list(file.parent.glob("*.png"))) == 4


def test_a_demo_that_cannot_write_fails_in_a_sentence(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    done = _demo(in_the_way)
    assert done.returncode == 1
    assert done.stderr.startswith("demo failed: no folder for the pictures")
    assert len(done.stderr.splitlines()) == 1


def test_a_demo_whose_daemon_cannot_start_shows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOADD_QUEUE_LIMIT", "none")
    done = _demo(tmp_path)
    assert done.returncode == 1
    assert "demo failed: the daemon ended with" in done.stderr
    assert "OFFLOADD_QUEUE_LIMIT" in done.stderr
    assert "Traceback" not in done.stderr


def _picture(file: Path) -> Image.Image:
    with Image.open(file) as picture:
        return picture.convert("RGB")


def _demo(pictures: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), "--pictures", str(pictures)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
