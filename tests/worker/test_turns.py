"""A job that gives way in the middle goes on later, and draws what it would have drawn alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosting.hosting_help import CALL, SEED, Drawn, plain_script
from hosting.tiny_pipelines import save_flux
from worker.conftest import register
from worker.worker_process import WorkerProcess

from offload_protocol import values
from offloadd.channel.messages import (
    CancelJob,
    GiveWay,
    JobEnded,
    JobParked,
    JobProgressed,
    LoadModel,
    ModelLoaded,
    ModelUnloaded,
    ResumeJob,
    RunJob,
    UnloadModel,
)

STEPS = 12
FLUX = {"max_sequence_length": 16}


@pytest.fixture(scope="module")
def flux_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def both(worker: WorkerProcess, flux_directory: Path) -> WorkerProcess:
    """A worker with two models in memory, `tiny` and `flux`."""
    register(worker, "flux", flux_directory)
    for name in ("tiny", "flux"):
        worker.send(LoadModel(name=name))
        worker.expect(ModelLoaded, name=name)
    return worker


def begin(worker: WorkerProcess, job: str, model: str, **changes: Any) -> None:
    frames: list[values.Frame] = []
    extra = FLUX if model == "flux" else {}
    arguments = values.pack({**CALL, **extra, **changes}, frames)
    worker.send(RunJob(job=job, model=model, arguments=arguments, seed=SEED), frames)


def begin_parked(worker: WorkerProcess, job: str, model: str, **changes: Any) -> JobParked:
    """Begin a job that gives way at its first border."""
    begin(worker, job, model, **changes)
    worker.send(GiveWay(job=job))
    return worker.expect(JobParked, job=job)


def images(ended: JobEnded) -> Drawn:
    assert ended.outcome is not None, ended.error
    drawn: Drawn = ended.outcome.outputs["images"]
    return drawn


def draw_in_turns(
    worker: WorkerProcess, model: str, between: str, every: int, **changes: Any
) -> tuple[JobEnded, int]:
    """Draw with a stop at each border, and a whole other job at every so many of them.

    Gives also the number of borders.
    """
    extra = FLUX if between == "flux" else {}
    begin_parked(worker, "long", model, num_inference_steps=STEPS, **changes)
    borders = 1
    while True:
        if borders % every == 1:
            ended = worker.run(f"at {borders}", between, seed=borders, **{**CALL, **extra})
            assert ended.error is None, ended.error
        worker.send(GiveWay(job="long"))
        worker.send(ResumeJob(job="long"))
        message, frames = worker.next_of(JobParked, JobEnded)
        if isinstance(message, JobEnded):
            return worker.unpacked(message, frames), borders
        borders += 1


@pytest.mark.parametrize(
    ("model", "between", "changes", "calls_per_step"),
    [
        ("tiny", "tiny", {"eta": 0.7}, 1),
        ("tiny", "flux", {}, 1),
        ("flux", "flux", {}, 1),
        ("flux", "tiny", {"true_cfg_scale": 3.0, "negative_prompt": "a dog"}, 2),
        ("flux", "flux", {"true_cfg_scale": 3.0, "negative_prompt": "a dog"}, 2),
    ],
)
def test_case_47_a_picture_drawn_in_turns_is_the_picture_of_a_plain_script(
    both: WorkerProcess,
    sd_directory: Path,
    flux_directory: Path,
    model: str,
    between: str,
    changes: dict[str, Any],
    calls_per_step: int,
) -> None:
    directory = {"tiny": sd_directory, "flux": flux_directory}[model]
    expected = plain_script(directory, num_inference_steps=STEPS, **changes)
    ended, borders = draw_in_turns(both, model, between, every=5, **changes)
    # The denoiser's calls and those of the text encoders; the first may pass before we say so.
    assert borders > calls_per_step * STEPS // 2
    np.testing.assert_array_equal(images(ended), expected)
    other = {"tiny": sd_directory, "flux": flux_directory}[between]
    undisturbed = both.run("after", between, SEED, **CALL, **(FLUX if between == "flux" else {}))
    np.testing.assert_array_equal(images(undisturbed), plain_script(other))


def test_a_job_tells_what_it_holds_while_it_is_parked(both: WorkerProcess) -> None:
    begin_parked(both, "holds", "tiny", num_inference_steps=STEPS)
    for _ in range(4):
        both.send(GiveWay(job="holds"))
        both.send(ResumeJob(job="holds"))
        parked = both.expect(JobParked, job="holds")
    # The latents of 1x4x8x8 float32, and the embeddings of two prompts, at least.
    assert parked.held_bytes > 1024 + 2 * 16 * 24 * 4
    assert parked.held_bytes < 1 << 20
    both.send(ResumeJob(job="holds"))
    assert both.end_of("holds").error is None


def test_several_jobs_can_be_parked_and_go_on_in_any_order(
    both: WorkerProcess, sd_directory: Path
) -> None:
    names = ["one", "two", "three"]
    for name in names:
        begin_parked(both, name, "tiny", num_inference_steps=STEPS, prompt=name)
    for name in ("two", "one", "three"):
        both.send(ResumeJob(job=name))
        expected = plain_script(sd_directory, num_inference_steps=STEPS, prompt=name)
        np.testing.assert_array_equal(images(both.end_of(name)), expected)


def test_case_31_a_parked_job_is_cancelled_while_another_has_the_device(
    both: WorkerProcess, reference: Drawn
) -> None:
    begin_parked(both, "parked", "tiny", num_inference_steps=900)
    begin(both, "runs", "flux", num_inference_steps=900)
    both.expect(JobProgressed, job="runs", state="running")
    both.send(CancelJob(job="parked"))
    ended = both.end_of("parked")
    assert ended.error is not None
    assert ended.error.code == "cancelled"
    both.send(CancelJob(job="runs"))
    both.end_of("runs")
    np.testing.assert_array_equal(images(both.run("next", "tiny", SEED, **CALL)), reference)


def test_what_is_said_of_a_job_that_has_ended_does_nothing(
    both: WorkerProcess, reference: Drawn
) -> None:
    both.run("over", "tiny", SEED, **CALL)
    for message in (GiveWay(job="over"), ResumeJob(job="over"), CancelJob(job="over")):
        both.send(message)
    np.testing.assert_array_equal(images(both.run("next", "tiny", SEED, **CALL)), reference)


def test_a_model_is_loaded_while_a_job_on_another_goes_on(both: WorkerProcess) -> None:
    both.send(UnloadModel(name="flux"))
    both.expect(ModelUnloaded, name="flux")
    begin(both, "goes on", "tiny", num_inference_steps=900)
    both.expect(JobProgressed, job="goes on", state="running")
    arguments = {**CALL, **FLUX}
    both.send(RunJob(job="loads", model="flux", arguments=arguments, seed=SEED, awaits_turn=True))
    both.expect(ModelLoaded, name="flux")
    assert both.expect(JobParked, job="loads").held_bytes == 0
    step = both.expect(JobProgressed, job="goes on").step
    assert step < 900, "the other job was not held up until its end"
    both.send(GiveWay(job="goes on"))
    both.expect(JobParked, job="goes on")
    both.send(ResumeJob(job="loads"))
    assert both.end_of("loads").error is None
    both.send(CancelJob(job="goes on"))
    both.end_of("goes on")


def test_case_43_a_model_stays_until_the_job_in_the_middle_of_it_has_ended(
    both: WorkerProcess, sd_directory: Path
) -> None:
    begin_parked(both, "middle", "tiny", num_inference_steps=STEPS)
    both.send(UnloadModel(name="tiny"))
    both.send(ResumeJob(job="middle"))
    expected = plain_script(sd_directory, num_inference_steps=STEPS)
    np.testing.assert_array_equal(images(both.end_of("middle")), expected)
    both.expect(ModelUnloaded, name="tiny")
