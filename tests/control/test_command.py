"""The command line of the daemon: what it prints, refuses and imports."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def offloadd(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "OFFLOADD" not in name}
    return subprocess.run(
        [sys.executable, "-m", "offloadd", *arguments],
        capture_output=True,
        text=True,
        env={**clean, **environ},
        check=False,
        timeout=60,
    )


def test_print_config_shows_what_would_hold(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[queue]\nlimit = 3\n")
    done = offloadd(
        *("--config", str(config), "--device", "cpu", "--print-config"),
        OFFLOADD_ENDPOINT="ipc:///run/x/y.sock",
        OFFLOADD_LOG_LEVEL="debug",
    )
    assert done.returncode == 0
    shown = tomllib.loads(done.stdout)
    assert shown["queue"]["limit"] == 3
    assert shown["daemon"]["device"] == "cpu"
    assert shown["daemon"]["endpoint"] == "ipc:///run/x/y.sock"
    assert shown["daemon"]["state_dir"].endswith("offloadd")
    assert shown["log"]["level"] == "debug"


def test_the_endpoint_of_the_command_line_goes_first() -> None:
    done = offloadd("--endpoint", "ipc:///a", "--print-config", OFFLOADD_ENDPOINT="ipc:///b")
    assert tomllib.loads(done.stdout)["daemon"]["endpoint"] == "ipc:///a"


def test_version_is_printed() -> None:
    done = offloadd("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("offloadd ")


def test_an_unknown_option_is_wrong_usage() -> None:
    assert offloadd("--colour").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--endpoint", "tcp://127.0.0.1:1"), "is not served without keys"),
        (("--endpoint", "nonsense"), "'nonsense' is not an endpoint"),
        (("--endpoint", "ipc:///" + "x" * 200), "the limit is 107"),
        (("--device", "gpu"), "option --device is 'gpu'"),
        (("--config", "/nowhere.toml"), "cannot read the configuration /nowhere.toml"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_exit_code_1(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = offloadd("--state-dir", str(tmp_path / "s"), *arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_the_extra_it_says_how_to_get_it() -> None:
    # A finder that knows no torch stands for an environment without it.
    code = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class WithoutTorch(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name == 'torch' else PathFinder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [\n"
        "    WithoutTorch if one is PathFinder else one for one in sys.meta_path\n"
        "]\n"
        "from offloadd.__main__ import main\n"
        "main([])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "pip install 'offloadd[daemon]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_control_plane_imports_neither_torch_nor_what_brings_it() -> None:
    code = (
        "import sys, offloadd.__main__, offloadd.control.main\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'accelerate', 'numpy', 'PIL', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
