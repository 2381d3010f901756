"""Prompt embeddings in a real worker: bounded by what it is told, kept apart by owner, reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosting.hosting_help import CALL, Drawn
from worker.conftest import register
from worker.worker_process import WorkerProcess

from offload_protocol import values
from offloadd.channel.messages import (
    DeviceReport,
    EmbeddingFigures,
    JobEnded,
    LimitEmbeddings,
    RunJob,
    UnloadModel,
)


def send(worker: WorkerProcess, job: str, owner: str | None, seed: int = 11, **more: Any) -> None:
    frames: list[values.Frame] = []
    packed = values.pack({**CALL, **more}, frames)
    message = RunJob(job=job, model="streamed", arguments=packed, seed=seed, owner=owner)
    worker.send(message, frames)


def drawn(worker: WorkerProcess, job: str, owner: str | None, **more: Any) -> JobEnded:
    send(worker, job, owner, **more)
    ended = worker.end_of(job)
    assert ended.outcome is not None
    return ended


def kept(worker: WorkerProcess) -> EmbeddingFigures:
    """The figures in a report that was made after all that was ordered before."""
    worker.send(UnloadModel(name="nothing"))
    worker.expect(DeviceReport)
    worker.send(UnloadModel(name="nothing"))
    return worker.expect(DeviceReport).embeddings


def test_a_prompt_is_encoded_once_for_its_owner_within_the_bound(
    worker: WorkerProcess, sd_directory: Path, reference: Drawn
) -> None:
    register(worker, "streamed", sd_directory, device_budget="400KiB", offload="stream")
    first = drawn(worker, "first", "uid:1")
    # Nothing was allowed yet.
    assert kept(worker) == EmbeddingFigures()
    worker.send(LimitEmbeddings(limit_bytes=1 << 20))
    for number, owner in enumerate(("uid:1", "uid:1", "uid:2", None)):
        ended = drawn(worker, f"again {number}", owner)
        assert ended.outcome is not None
        np.testing.assert_array_equal(ended.outcome.outputs["images"], reference)
    figures = kept(worker)
    assert figures.hits > 0
    assert figures.misses == 2 * figures.hits
    assert first.outcome is not None
    # Jobs that share the model's sweeps.
    for number in range(3):
        send(worker, f"beside {number}", f"uid:{number}")
    for _ in range(3):
        ended = worker.unpacked(*worker.expect_frames(JobEnded))
        assert ended.outcome is not None
        np.testing.assert_array_equal(ended.outcome.outputs["images"], reference)
    worker.send(LimitEmbeddings(limit_bytes=0))
    assert kept(worker).entries == 0
    worker.send(UnloadModel(name="streamed", forget=True))


@pytest.fixture(autouse=True)
def _nothing_is_left(worker: WorkerProcess) -> Any:
    yield
    worker.send(LimitEmbeddings(limit_bytes=0))
