"""Tiny pipelines on disk, saved once, and the pictures that a plain diffusers script draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosting.hosting_help import Drawn, plain_script
from hosting.tiny_pipelines import save_flux, save_sd


@pytest.fixture(scope="session")
def sd_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sd(tmp_path_factory.mktemp("sd"))


@pytest.fixture(scope="session")
def other_sd_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes as `sd_directory` with other weights."""
    return save_sd(tmp_path_factory.mktemp("other_sd"), seed=50)


@pytest.fixture(scope="session")
def flux_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="session")
def references(
    sd_directory: Path, other_sd_directory: Path, flux_directory: Path
) -> dict[Path, Drawn]:
    """What a plain script draws from each directory with the default call of the tests."""
    return {
        directory: plain_script(directory)
        for directory in (sd_directory, other_sd_directory, flux_directory)
    }
