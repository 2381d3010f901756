"""Jobs that a worker has at once on a streamed model share its passes, and draw as alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosting.hosting_help import CALL, Drawn
from hosting.tiny_adapter_files import ATTENTION, save_adapter, sd_adapter
from worker.conftest import register
from worker.worker_process import WorkerProcess

from offload_protocol import values
from offload_protocol.messages import AdapterChoice
from offloadd.channel.messages import (
    CancelJob,
    FromWorker,
    GiveWay,
    JobEnded,
    JobParked,
    JobProgressed,
    ResumeJob,
    RunJob,
)

MODEL = "streamed"
STEPS = {"a": 6, "b": 4, "c": 7, "d": 3}
LONG = 900


@pytest.fixture(scope="module")
def streaming(
    worker: WorkerProcess, sd_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> WorkerProcess:
    """A worker whose model streams its denoiser from disk, with a plan, and has an adapter."""
    at = tmp_path_factory.mktemp("packs")
    on_disk = {"mode": "group", "offload_to_disk_path": str(at)}
    ink = save_adapter(at / "ink.safetensors", sd_adapter(sd_directory, 1, ATTENTION, encoder=True))
    adapters = [{"name": "ink", "source": str(ink)}]
    register(worker, MODEL, sd_directory, components={"unet": on_disk}, adapters=adapters)
    for number in range(2):
        assert worker.run(f"warm {number}", MODEL, **CALL).outcome is not None
    return worker


def begin(
    worker: WorkerProcess,
    job: str,
    steps: int,
    model: str = MODEL,
    call: Mapping[str, Any] = CALL,
    **fields: Any,
) -> None:
    frames: list[values.Frame] = []
    arguments = values.pack({**call, "num_inference_steps": steps}, frames)
    worker.send(
        RunJob(job=job, model=model, arguments=arguments, seed=ord(job[0]), **fields), frames
    )


def ends(worker: WorkerProcess, jobs: set[str]) -> dict[str, JobEnded]:
    """How these jobs end, in whatever order."""
    found: dict[str, JobEnded] = {}
    while jobs - found.keys():
        message, frames = worker.next_of(JobEnded)
        assert isinstance(message, JobEnded)
        found[message.job] = worker.unpacked(message, frames)
    return found


def images(ended: JobEnded) -> Drawn:
    assert ended.outcome is not None, ended.error
    drawn: Drawn = ended.outcome.outputs["images"]
    return drawn


@pytest.fixture(scope="module")
def alone(streaming: WorkerProcess) -> dict[str, Drawn]:
    """What each job draws when no other is there."""
    drawn = {}
    for job, steps in STEPS.items():
        begin(streaming, job, steps)
        drawn[job] = images(streaming.end_of(job))
    return drawn


def running(worker: WorkerProcess, jobs: set[str]) -> list[FromWorker]:
    """Wait until each of these jobs has made a step; gives what was said."""
    said: list[FromWorker] = []
    while jobs:
        message, _ = worker.receive()
        said.append(message)
        if isinstance(message, JobProgressed) and message.step > 0:
            jobs = jobs - {message.job}
    return said


def test_jobs_that_come_together_go_on_together_and_draw_as_alone(
    streaming: WorkerProcess, alone: dict[str, Drawn]
) -> None:
    for job, steps in STEPS.items():
        begin(streaming, job, steps)
    said = running(streaming, set(STEPS))
    assert not any(isinstance(one, JobEnded) for one in said), "all have begun before one ends"
    for job, ended in ends(streaming, set(STEPS)).items():
        np.testing.assert_array_equal(images(ended), alone[job])


def test_jobs_that_wear_the_same_adapter_go_on_together_and_draw_as_alone(
    streaming: WorkerProcess, alone: dict[str, Drawn]
) -> None:
    wears = [AdapterChoice(name="ink", weight=0.8)]
    coloured = {}
    for job in ("a", "c"):
        begin(streaming, job, STEPS[job], adapters=wears)
        coloured[job] = images(streaming.end_of(job))
        assert not np.array_equal(coloured[job], alone[job])
    for job in ("a", "c"):
        begin(streaming, job, STEPS[job], adapters=wears)
    said = running(streaming, {"a", "c"})
    assert not any(isinstance(one, JobEnded) for one in said), "both have begun before one ends"
    for job, ended in ends(streaming, {"a", "c"}).items():
        np.testing.assert_array_equal(images(ended), coloured[job])
    begin(streaming, "b", STEPS["b"])
    np.testing.assert_array_equal(images(streaming.end_of("b")), alone["b"])


def test_one_that_gives_way_leaves_those_that_wear_the_same_and_comes_back_to_it(
    streaming: WorkerProcess, alone: dict[str, Drawn]
) -> None:
    wears = [AdapterChoice(name="ink", weight=0.8)]
    begin(streaming, "c", STEPS["c"], adapters=wears)
    coloured = images(streaming.end_of("c"))
    begin(streaming, "a long one", 40, adapters=wears)
    expected = images(streaming.end_of("a long one"))
    begin(streaming, "a long one", 40, adapters=wears)
    begin(streaming, "c", STEPS["c"], adapters=wears)
    running(streaming, {"a long one"})
    streaming.send(GiveWay(job="a long one"))
    found: dict[str, JobEnded] = {}
    has_parked = False
    while not (found and has_parked):
        message, frames = streaming.next_of(JobEnded, JobParked)
        has_parked = has_parked or isinstance(message, JobParked)
        if isinstance(message, JobEnded):
            found[message.job] = streaming.unpacked(message, frames)
    np.testing.assert_array_equal(images(found["c"]), coloured)
    begin(streaming, "b", STEPS["b"])
    np.testing.assert_array_equal(images(streaming.end_of("b")), alone["b"])
    streaming.send(ResumeJob(job="a long one"))
    np.testing.assert_array_equal(images(streaming.end_of("a long one")), expected)


def test_one_that_gives_way_leaves_the_others_and_comes_back_to_them(
    streaming: WorkerProcess, alone: dict[str, Drawn]
) -> None:
    begin(streaming, "a long one", LONG)
    for job in ("a", "c"):
        begin(streaming, job, STEPS[job])
    running(streaming, {"a long one"})
    streaming.send(GiveWay(job="a long one"))
    found: dict[str, JobEnded] = {}
    while len(found) < 2:
        message, frames = streaming.next_of(JobEnded, JobParked)
        if isinstance(message, JobEnded):
            found[message.job] = streaming.unpacked(message, frames)
    for job in ("a", "c"):
        np.testing.assert_array_equal(images(found[job]), alone[job])
    begin(streaming, "b", STEPS["b"])
    streaming.send(ResumeJob(job="a long one"))
    np.testing.assert_array_equal(images(ends(streaming, {"b"})["b"]), alone["b"])
    streaming.send(CancelJob(job="a long one"))
    error = streaming.end_of("a long one").error
    assert error is not None
    assert error.code == "cancelled"


def test_one_that_is_cancelled_leaves_the_others_as_they_are(
    streaming: WorkerProcess, alone: dict[str, Drawn]
) -> None:
    begin(streaming, "x", LONG)
    begin(streaming, "c", STEPS["c"])
    running(streaming, {"x"})
    streaming.send(CancelJob(job="x"))
    found = ends(streaming, {"x", "c"})
    error = found["x"].error
    assert error is not None
    assert error.code == "cancelled"
    np.testing.assert_array_equal(images(found["c"]), alone["c"])


def test_all_that_give_way_leave_the_device_to_a_job_on_another_model(
    streaming: WorkerProcess, alone: dict[str, Drawn], reference: Drawn
) -> None:
    for job in ("x", "y"):
        begin(streaming, job, LONG)
    running(streaming, {"x", "y"})
    for job in ("x", "y"):
        streaming.send(GiveWay(job=job))
    for _ in range(2):
        streaming.next_of(JobParked)
    ended = streaming.run("between", "tiny", 3, **CALL)
    assert ended.outcome is not None
    for job in ("x", "y"):
        streaming.send(CancelJob(job=job))
    ends(streaming, {"x", "y"})
    begin(streaming, "d", STEPS["d"])
    np.testing.assert_array_equal(images(streaming.end_of("d")), alone["d"])


INK = AdapterChoice(name="ink", weight=0.8)
SCALED: dict[str, Any] = {**CALL, "cross_attention_kwargs": {"scale": 0.5}}
DRESSED: dict[str, dict[str, Any]] = {
    "a": {"call": SCALED, "adapters": [INK]},
    "b": {"adapters": [INK]},
    "c": {},
    "d": {"call": SCALED},
    "e": {"adapters": [AdapterChoice(name="ink", weight=0.3)]},
}


@pytest.mark.parametrize("order", ["ab", "aba", "eabcd"])
def test_a_scale_for_adapters_is_that_of_its_own_job(streaming: WorkerProcess, order: str) -> None:
    """The text encoder is scaled around its call, at whose entry others may go on."""
    fields = {f"{job}{number}": DRESSED[job] for number, job in enumerate(order)}
    draw_together_as_alone(streaming, fields)


GUIDED: dict[str, dict[str, Any]] = {
    "a": {"call": {**CALL, "pag_scale": 3.0}},
    "b": {"call": {**CALL, "pag_scale": 0.0}},
    "c": {"call": {**CALL, "pag_scale": 3.0, "guidance_scale": 0.0}},
}


@pytest.fixture(scope="module")
def guided(
    worker: WorkerProcess, sd_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> WorkerProcess:
    """A worker with a streamed model whose calls exchange attention processors."""
    at = tmp_path_factory.mktemp("guided")
    shutil.copytree(sd_directory, at / "model")
    index = at / "model" / "model_index.json"
    described = json.loads(index.read_text())
    index.write_text(json.dumps({**described, "_class_name": "StableDiffusionPAGPipeline"}))
    on_disk = {"mode": "group", "offload_to_disk_path": str(at / "packs")}
    register(worker, "guided", at / "model", components={"unet": on_disk})
    for number in range(2):
        assert worker.run(f"guided {number}", "guided", **CALL).outcome is not None
    return worker


@pytest.mark.parametrize("order", ["ab", "ba", "cbab"])
def test_processors_of_attention_are_those_of_the_job_that_set_them(
    guided: WorkerProcess, order: str
) -> None:
    fields = {f"{job}{number}": GUIDED[job] for number, job in enumerate(order)}
    draw_together_as_alone(guided, fields, model="guided")


def draw_together_as_alone(
    worker: WorkerProcess, fields: Mapping[str, dict[str, Any]], model: str = MODEL
) -> None:
    """Draw these jobs one by one, all at once, and the first by itself again."""
    expected = {}
    for job, more in fields.items():
        begin(worker, job, 3, model, **more)
        expected[job] = images(worker.end_of(job))
    for job, more in fields.items():
        begin(worker, job, 3, model, **more)
    for job, ended in ends(worker, set(fields)).items():
        np.testing.assert_array_equal(images(ended), expected[job])
    first = next(iter(fields))
    begin(worker, first, 3, model, **fields[first])
    np.testing.assert_array_equal(images(worker.end_of(first)), expected[first])
