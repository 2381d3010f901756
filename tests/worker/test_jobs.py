"""A real worker answers each order once, and no job's end shows in the next job's picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hosting.hosting_help import CALL, SEED, Drawn, plain_script
from hosting.tiny_pipelines import save_sd
from worker.conftest import register
from worker.worker_process import WorkerProcess

from offloadd.channel.checked_specs import model_spec
from offloadd.channel.messages import (
    CancelJob,
    DeviceReport,
    JobEnded,
    JobProgressed,
    LoadModel,
    ModelDescribed,
    ModelFailed,
    ModelLoaded,
    ModelUnloaded,
    Register,
    RunJob,
    UnloadModel,
)
from offloadd.channel.specs import ModelSpec
from offloadd.worker.crew import MOST_ON_MODELS

LONG = {**CALL, "num_inference_steps": 900}


def check_picture(worker: WorkerProcess, job: str, reference: Drawn) -> None:
    ended = worker.run(job, "tiny", SEED, **CALL)
    assert ended.outcome is not None, ended.error
    np.testing.assert_array_equal(ended.outcome.outputs["images"], reference)


def code_of(ended: JobEnded) -> str:
    assert ended.error is not None
    return ended.error.code


def test_a_job_loads_its_model_and_draws_the_picture_of_a_plain_script(
    worker: WorkerProcess, reference: Drawn
) -> None:
    worker.send(UnloadModel(name="tiny"))
    worker.expect(ModelUnloaded, name="tiny")
    before = len(worker.news)
    ended = worker.run("first", "tiny", SEED, **CALL)
    assert ended.outcome is not None
    np.testing.assert_array_equal(ended.outcome.outputs["images"], reference)
    assert ended.outcome.seeds == [SEED]
    assert ended.outcome.timings.loading_s > 0
    assert ended.outcome.timings.running_s > 0
    assert ended.outcome.peak_device_bytes > 0
    said = worker.news[before:]
    progress = [(one.state, one.step, one.steps) for one in said if isinstance(one, JobProgressed)]
    assert progress[0] == ("loading", 0, 5)
    assert progress[-1] == ("running", 3, 3)
    assert ("running", 0, 3) in progress
    assert [one.offload for one in said if isinstance(one, ModelLoaded)] == ["none"]
    assert worker.expect(DeviceReport).resident_bytes > 0


def test_a_loaded_model_is_not_loaded_again(worker: WorkerProcess, reference: Drawn) -> None:
    worker.send(LoadModel(name="tiny"))
    worker.expect(ModelLoaded)
    ended = worker.run("again", "tiny", SEED, **CALL)
    assert ended.outcome is not None
    assert ended.outcome.timings.loading_s == 0.0


def test_pictures_and_arrays_travel_both_ways(worker: WorkerProcess, sd_directory: Path) -> None:
    embeds = np.linspace(-1, 1, 16 * 24, dtype=np.float32).reshape(1, 16, 24)
    given = {"num_inference_steps": 2, "prompt_embeds": embeds, "negative_prompt_embeds": -embeds}
    ended = worker.run("arrays", "tiny", 4, **given)
    assert ended.outcome is not None, ended.error
    (image,) = ended.outcome.outputs["images"]
    assert (image.mode, image.size) == ("RGB", (16, 16))
    assert np.asarray(image).std() > 1
    again = worker.run("arrays again", "tiny", 4, **given)
    assert again.outcome is not None
    np.testing.assert_array_equal(np.asarray(again.outcome.outputs["images"][0]), np.asarray(image))


def test_a_batch_reports_a_seed_for_each_picture(worker: WorkerProcess, sd_directory: Path) -> None:
    ended = worker.run("batch", "tiny", 40, **{**CALL, "prompt": ["a", "b"]})
    assert ended.outcome is not None
    assert ended.outcome.seeds == [40, 41]
    alone = plain_script(sd_directory, 41, prompt="b")
    np.testing.assert_allclose(ended.outcome.outputs["images"][1], alone[0], atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ({"colour": "red"}, "invalid_request", "colour"),
        ({"generator": 3}, "invalid_request", "generator"),
        ({"callback_on_step_end": "print"}, "invalid_request", "callback_on_step_end"),
        ({"prompt": 7}, "invalid_request", "prompt"),
        ({}, "invalid_request", "prompt"),
        ({"prompt": ["a", 3]}, "invalid_request", "str"),
        ({"prompt": "a", "clip_skip": 50}, "invalid_request", "index"),
        ({"prompt": "a", "num_inference_steps": 5000}, "invalid_request", "5000"),
        ({"prompt": "a", "num_images_per_prompt": 0}, "invalid_request", "0 pictures"),
        ({"prompt": "a", "latents": np.zeros((1, 3, 5, 5))}, "invalid_request", ""),
        ({"prompt": "a", "height": 1 << 20, "width": 1 << 20}, "out_of_memory", "asked for"),
    ],
)
def test_bad_arguments_are_answered_and_the_next_picture_is_right(
    worker: WorkerProcess, reference: Drawn, arguments: dict[str, Any], code: str, named: str
) -> None:
    ended = worker.run("bad", "tiny", **arguments)
    assert ended.error is not None, ended
    assert ended.error.code == code, ended.error
    assert named in ended.error.message, ended.error
    check_picture(worker, "after bad", reference)


def test_out_of_memory_is_told_in_bytes(worker: WorkerProcess) -> None:
    ended = worker.run("huge", "tiny", prompt="a", height=1 << 20, width=1 << 20)
    assert ended.error is not None
    assert ended.error.details["needed_bytes"] > 1 << 30
    assert ended.error.details["free_bytes"] > 0


def test_models_are_looked_at_while_a_job_is_in_the_middle_of_a_long_forward(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    large = {**CALL, "height": 160, "width": 160, "num_inference_steps": 50}
    worker.send(RunJob(job="large", model="tiny", arguments=large, seed=1))
    worker.expect(JobProgressed, job="large", state="running")
    nowhere = 2 * MOST_ON_MODELS
    for number in range(nowhere):
        source = str(tmp_path / str(number))
        worker.send(Register(spec=model_spec(f"nowhere-{number}", source, {})))
    before = len(worker.news)
    for _ in range(nowhere):
        worker.expect(ModelFailed)
    steps = [one.step for one in worker.news[before:] if isinstance(one, JobProgressed)]
    worker.send(CancelJob(job="large"))
    assert code_of(worker.end_of("large")) == "cancelled"
    # Each that waits for the device to say what it has takes a forward.
    assert max(steps, default=0) < 2


def test_case_31_a_running_job_ends_when_it_is_cancelled(
    worker: WorkerProcess, reference: Drawn
) -> None:
    worker.send(RunJob(job="long", model="tiny", arguments=LONG, seed=1))
    worker.expect(JobProgressed, job="long", state="running")
    worker.send(CancelJob(job="long"))
    assert code_of(worker.end_of("long")) == "cancelled"
    steps = [one.step for one in worker.news if isinstance(one, JobProgressed)]
    assert steps[-1] < 900
    check_picture(worker, "after long", reference)


def test_case_32_a_job_that_waits_is_cancelled_without_touching_the_running_one(
    worker: WorkerProcess,
) -> None:
    worker.send(RunJob(job="runs", model="tiny", arguments=LONG, seed=1))
    worker.expect(JobProgressed, job="runs", state="running")
    worker.send(RunJob(job="waits", model="tiny", arguments=CALL, seed=1))
    worker.send(CancelJob(job="never heard of"))
    worker.send(CancelJob(job="waits"))
    assert code_of(worker.end_of("waits")) == "cancelled"
    worker.send(CancelJob(job="waits"))
    worker.send(CancelJob(job="runs"))
    assert code_of(worker.end_of("runs")) == "cancelled"
    worker.run("after", "tiny", **CALL)
    ends = [one.job for one in worker.news if isinstance(one, JobEnded)]
    assert ends.count("waits") == ends.count("runs") == 1


def test_case_31_a_cancel_while_loading_leaves_the_model_unloaded(
    worker: WorkerProcess, reference: Drawn
) -> None:
    worker.send(UnloadModel(name="tiny"))
    worker.expect(ModelUnloaded)
    worker.expect(DeviceReport, resident_bytes=0)
    before = len(worker.news)
    worker.send(RunJob(job="loading", model="tiny", arguments=CALL, seed=1))
    worker.expect(JobProgressed, job="loading", state="loading")
    worker.send(CancelJob(job="loading"))
    assert code_of(worker.end_of("loading")) == "cancelled"
    assert worker.expect(DeviceReport).resident_bytes == 0
    assert not [one for one in worker.news[before:] if isinstance(one, ModelLoaded)]
    check_picture(worker, "after loading", reference)


def test_case_20_unloading_gives_the_memory_back(
    worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    register(worker, "wide", save_sd(tmp_path_factory.mktemp("wide"), width=192))
    process = psutil.Process(worker.process.pid)
    kept: list[int] = []
    for number in range(3):
        assert worker.run(f"wide {number}", "wide", **CALL).error is None
        loaded_bytes = process.memory_info().rss
        worker.send(UnloadModel(name="wide"))
        worker.expect(ModelUnloaded, name="wide")
        kept.append(process.memory_info().rss)
        assert loaded_bytes - kept[-1] > 40 << 20
    assert kept[2] - kept[1] < 8 << 20


def test_an_unknown_model_is_refused(worker: WorkerProcess) -> None:
    assert code_of(worker.run("lost", "nothing", prompt="a")) == "unknown_model"


def test_a_source_that_is_no_pipeline_is_refused(worker: WorkerProcess, tmp_path: Path) -> None:
    worker.send(Register(spec=ModelSpec(name="empty", source=str(tmp_path))))
    failed = worker.expect(ModelFailed, name="empty")
    assert failed.error.code == "model_load_failed"
    assert "model_index.json" in failed.error.message


def test_a_model_whose_file_vanished_fails_its_job_and_is_loaded_once_it_is_back(
    worker: WorkerProcess, sd_directory: Path, tmp_path: Path
) -> None:
    weights = "unet/diffusion_pytorch_model.safetensors"
    for part in sd_directory.rglob("*"):
        if part.is_file():
            target = tmp_path / part.relative_to(sd_directory)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(part.read_bytes())
    register(worker, "moving", tmp_path)
    kept = (tmp_path / weights).read_bytes()
    (tmp_path / weights).unlink()
    assert code_of(worker.run("gone", "moving", **CALL)) == "model_load_failed"
    assert [one for one in worker.news if isinstance(one, ModelFailed) and one.name == "moving"]
    (tmp_path / weights).write_bytes(kept)
    assert worker.run("back", "moving", **CALL).error is None
    worker.send(UnloadModel(name="moving", forget=True))
    worker.expect(ModelUnloaded, name="moving")
    assert code_of(worker.run("forgotten", "moving", **CALL)) == "unknown_model"


def test_a_model_registered_anew_takes_its_new_settings(
    worker: WorkerProcess, sd_directory: Path, reference: Drawn
) -> None:
    worker.send(LoadModel(name="tiny"))
    worker.expect(ModelLoaded)
    described = register(worker, "tiny", sd_directory, offload="sequential")
    assert isinstance(described, ModelDescribed)
    worker.send(LoadModel(name="tiny"))
    assert worker.expect(ModelLoaded).offload == "sequential"
    check_picture(worker, "anew", reference)
    register(worker, "tiny", sd_directory)


def test_settings_that_leave_nothing_to_choose_are_taken_and_told_in_the_log(
    worker: WorkerProcess, sd_directory: Path
) -> None:
    register(worker, "streamed", sd_directory, offload={"mode": "group", "use_stream": True})
    assert "use_stream of offload change nothing" in worker.log()


def test_a_model_streams_within_its_own_budget(
    worker: WorkerProcess, sd_directory: Path, reference: Drawn
) -> None:
    described = register(worker, "small", sd_directory, device_budget="600KB")
    whole = sum(one.bytes for one in described.components)
    worker.send(LoadModel(name="small"))
    assert worker.expect(ModelLoaded, name="small").offload == "stream"
    for number in range(2):
        ended = worker.run(f"small {number}", "small", SEED, **CALL)
        assert ended.outcome is not None, ended.error
        np.testing.assert_array_equal(ended.outcome.outputs["images"], reference)
        assert ended.outcome.moved_bytes > 0
    worker.send(UnloadModel(name="tiny"))
    worker.expect(ModelUnloaded, name="tiny")
    report = worker.expect(DeviceReport)
    assert 0 < report.resident_bytes + report.ring_bytes <= 600_000 < whole
    worker.send(UnloadModel(name="small", forget=True))
    worker.expect(ModelUnloaded, name="small")
    assert worker.expect(DeviceReport).ring_bytes == 0


def test_a_budget_that_cannot_work_is_refused_with_the_smallest_that_does(
    worker: WorkerProcess, sd_directory: Path
) -> None:
    register(worker, "starved", sd_directory, device_budget=1000)
    worker.send(LoadModel(name="starved"))
    error = worker.expect(ModelFailed, name="starved").error
    assert error.code == "out_of_memory"
    assert error.details["minimum_budget_bytes"] > 1000


def test_the_log_has_a_line_for_each_event_and_no_noise(worker: WorkerProcess) -> None:
    worker.run("logged", "tiny", **CALL)
    worker.expect(DeviceReport)
    lines = worker.log().splitlines()
    assert any("loaded model=tiny" in line for line in lines)
    assert not [line for line in lines if "torchvision" in line or "%|" in line or "it/s" in line]
    assert not [line for line in lines if "FutureWarning" in line or "DeprecationWarning" in line]
