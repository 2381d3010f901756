"""A worker with a tiny model registered, shared by the tests of a module, and plain pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosting.hosting_help import Drawn, plain_script
from hosting.tiny_pipelines import save_sd
from worker.worker_process import WorkerProcess, worker_process

from offloadd.channel.checked_specs import model_spec
from offloadd.channel.messages import ModelDescribed, Register


@pytest.fixture(scope="session")
def sd_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sd(tmp_path_factory.mktemp("sd"))


@pytest.fixture(scope="session")
def reference(sd_directory: Path) -> Drawn:
    """What a plain script draws for the call in `hosting_help`."""
    return plain_script(sd_directory)


@pytest.fixture(scope="module")
def worker(sd_directory: Path) -> Iterator[WorkerProcess]:
    with worker_process() as process:
        register(process, "tiny", sd_directory)
        yield process


def register(worker: WorkerProcess, name: str, source: Path, **options: Any) -> ModelDescribed:
    worker.send(Register(spec=model_spec(name, str(source), options)))
    return worker.expect(ModelDescribed, name=name)
