"""What is in the wheel, and what it asks for."""

from __future__ import annotations

import email.message
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from installation.plain_install import build

PACKAGES = ("offload_client", "offloadctl", "offload_protocol", "offloadd")
LARGEST_BYTES = 14 * 2**20


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in _names(wheel)}
    assert tops == {*PACKAGES, next(top for top in tops if top.endswith(".dist-info"))}


def test_every_package_says_that_it_is_typed(wheel: Path) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= _names(wheel)


def test_the_wheel_brings_the_weights_of_shapes_within_its_size(wheel: Path) -> None:
    weights = [name for name in _names(wheel) if name.endswith(".safetensors")]
    assert weights
    assert all(name.startswith("offloadd/hosting/shapes/") for name in weights)
    assert wheel.stat().st_size < LARGEST_BYTES


def test_the_wheel_brings_the_licence_and_says_its_name(wheel: Path) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in _names(wheel))
    assert _metadata(wheel)["License-Expression"] == "Apache-2.0"


def test_the_wheel_names_both_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        commands = archive.read(entry).decode().split()
    assert [word for word in commands if word.startswith("offload") and ":" not in word] == [
        "offloadctl",
        "offloadd",
    ]


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build("sdist", tmp_path / "sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert _names(build("wheel", tmp_path / "wheel", unpacked)) == _names(wheel)


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(path).decode())
