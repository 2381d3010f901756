"""Hello, submit, progress, result: the way of a request through the running control plane."""

from __future__ import annotations

import os

import pytest
from control.conftest import Serve, until

from offload_protocol.errors import (
    IdConflict,
    InternalError,
    InvalidRequest,
    TooLarge,
    UnknownJob,
    UnknownModel,
)
from offload_protocol.messages import Fetch, Jobs, Models, Ping, Stats, Submit, Taken
from offloadd.config import Config
from offloadd.control.jobs.jobs import JobTable

IMAGE = {"$image": 0, "mode": "RGB", "size": [2, 2]}


async def test_a_job_is_accepted_run_and_its_result_delivered(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        accepted = await client.submit("a", seed=7)
        assert accepted["job"] == "a"
        finished, frames = await client.end_of("a")
        assert finished.state == "done"
        assert finished.outcome is not None
        assert finished.outcome.seeds == [7]
        assert finished.outcome.timings.running_s == 0.5
        assert finished.outcome.timings.queued_s > 0
        assert frames == []
        assert await client.ask(Taken, job="a") == {}
        stats = await client.ask(Stats)
        assert stats["jobs"]["completed_total"] == 1
        assert stats["jobs"]["results_kept"] == 0


async def test_frames_go_to_the_worker_and_come_back(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        pixels = bytes(range(12))
        arguments = {"prompt": "echo", "image": IMAGE}
        await client.ask(Submit, [pixels], job="a", model="good", arguments=arguments)
        finished, frames = await client.end_of("a")
        assert finished.outcome is not None
        assert finished.outcome.outputs["arguments"] == arguments
        assert frames == [pixels]


async def test_progress_is_told_while_a_job_runs(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", "steps 5")
        await client.end_of("a")
        steps = [one.step for one in client.progress if one.state == "running"]
        assert steps == [0, 1, 2, 3, 4, 5]
        assert client.progress[-1].steps == 5


async def test_places_in_the_queue_are_told_as_they_change(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("long", "steps 60")
        for job in ("b", "c"):
            await client.submit(job, "steps 40")
        await client.end_of("c")
        places = [one.position for one in client.progress if one.job == "c" and one.position]
        assert places == [2, 1]


async def test_a_seed_is_drawn_and_reported_where_none_is_given(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        seeds = set()
        for job in "abc":
            await client.submit(job)
            finished, _ = await client.end_of(job)
            assert finished.outcome is not None
            seeds.update(finished.outcome.seeds)
        assert len(seeds) == 3


async def test_a_result_waits_for_a_client_that_comes_back(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client("me")
        await client.submit("a", "big 100000")
        client.socket.close(linger=0)
        again = await rig.client("me")
        await again.ask(Fetch, job="a")
        finished, frames = await again.end_of("a")
        assert finished.state == "done"
        assert frames == [bytes(100_000)]


async def test_an_id_said_twice_runs_once(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", "steps 20", seed=1)
        await client.submit("a", "steps 20", seed=1)
        await client.end_of("a")
        await client.submit("a", "steps 20", seed=1)
        await client.end_of("a")
        stats = await client.ask(Stats)
        assert stats["jobs"]["completed_total"] == 1


async def test_an_id_for_another_request_is_a_conflict(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", "steps 20")
        with pytest.raises(IdConflict, match="already used for another request"):
            await client.submit("a", "steps 21")
        with pytest.raises(IdConflict):
            await client.submit("a", "steps 20", seed=3)
        arguments = {"prompt": "echo", "image": IMAGE}
        await client.ask(Submit, [bytes(12)], job="b", model="good", arguments=arguments)
        with pytest.raises(IdConflict):
            await client.ask(Submit, [b"x" * 12], job="b", model="good", arguments=arguments)


async def test_a_result_that_was_taken_is_gone(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", seed=1)
        await client.end_of("a")
        await client.ask(Taken, job="a")
        with pytest.raises(UnknownJob, match="was taken"):
            await client.ask(Fetch, job="a")
        with pytest.raises(IdConflict, match="was taken"):
            await client.submit("a", seed=1)


async def test_a_result_expires(serve: Serve) -> None:
    config = Config.model_validate({"results": {"keep": 0.3}})
    async with serve(config) as rig:
        client = await rig.client()
        await client.submit("a")
        await client.end_of("a")

        async def is_forgotten() -> bool:
            return not (await client.ask(Jobs))["jobs"]

        await until(is_forgotten)
        with pytest.raises(UnknownJob):
            await client.ask(Fetch, job="a")
        assert (await client.ask(Stats))["jobs"]["results_kept"] == 0


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"model": "god"}, UnknownModel, "did you mean 'good'"),
        ({"model": "x" * 300}, UnknownModel, "hosted are: "),
        ({"arguments": {"zzz": 1}}, InvalidRequest, "takes no argument 'zzz'"),
        ({"arguments": {"num_inference_steps": -1}}, InvalidRequest, "is -1"),
        ({"arguments": {"prompt": "x" * 70_000}}, TooLarge, "70000 characters"),
        ({"arguments": {"image": IMAGE}}, InvalidRequest, "refers to frame 0, of 0"),
        ({"seed": -1}, InvalidRequest, "the seed is -1"),
        ({"seed": 1 << 63}, InvalidRequest, "the seed is"),
        ({"priority": 1000}, InvalidRequest, "the priority is 1000"),
        ({"queue_timeout_s": 0.0}, InvalidRequest, "queue_timeout_s is 0.0"),
        ({"run_timeout_s": float("nan")}, InvalidRequest, "run_timeout_s is nan"),
        ({"job": ""}, InvalidRequest, "is not a job id"),
        ({"job": "a b"}, InvalidRequest, "is not a job id"),
        ({"job": "a" * 201}, InvalidRequest, "is not a job id"),
    ],
)
async def test_what_can_never_run_is_refused_before_it_is_queued(
    serve: Serve, fields: dict[str, object], error: type[Exception], says: str
) -> None:
    async with serve() as rig:
        client = await rig.client()

        async def is_described() -> bool:
            models = (await client.ask(Models))["models"]
            return bool(next(one for one in models if one["name"] == "good")["pipeline"])

        await until(is_described)
        job = str(fields.pop("job", "a"))
        with pytest.raises(error, match=says):
            await client.submit(job, **fields)  # type: ignore[arg-type]
        assert (await client.ask(Jobs))["jobs"] == []


async def test_requests_wait_for_their_models_description_and_fail_by_it(serve: Serve) -> None:
    async with serve(worker=("--late-s", "0.5")) as rig:
        client = await rig.client()
        await client.submit("wrong", arguments={"zzz": 1})
        await client.submit("lost", model="bad")
        await client.submit("right")
        finished, _ = await client.end_of("wrong")
        assert finished.error is not None
        assert finished.error.code == "invalid_request"
        finished, _ = await client.end_of("lost")
        assert finished.error is not None
        assert finished.error.code == "model_load_failed"
        finished, _ = await client.end_of("right")
        assert finished.state == "done"


async def test_everything_is_answered_before_there_is_a_worker(serve: Serve) -> None:
    async with serve(worker=("--late-s", "30")) as rig:
        client = await rig.client()
        assert await client.ask(Ping) == {}
        stats = await client.ask(Stats)
        assert stats["daemon"]["state"] == "starting"
        assert stats["devices"] == []
        assert stats["workers"][0]["state"] == "starting"
        assert len((await client.ask(Models))["models"]) == 5
        assert (await client.submit("a"))["state"] == "queued"


async def test_a_fault_of_ours_costs_one_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as rig:
        client = await rig.client()
        with monkeypatch.context() as broken:
            broken.setattr(JobTable, "__iter__", lambda self: 1 / 0)
            with pytest.raises(InternalError, match="a fault in offloadd"):
                await client.ask(Jobs)
        assert "ZeroDivisionError" in caplog.text
        assert (await client.ask(Jobs))["jobs"] == []


async def test_stats_have_every_key_that_programs_rely_on(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a")
        await client.end_of("a")
        stats = await client.ask(Stats)
    keys = {
        "daemon": {"version", "pid", "uptime_s", "endpoint", "state"},
        "store": {
            *("host_budget_bytes", "host_used_bytes", "pinned_bytes"),
            *("disk_read_bytes_total", "deduplicated_bytes"),
        },
        "embeddings": {
            *("limit_bytes", "size_bytes", "entries"),
            *("hits_total", "misses_total", "evicted_total"),
        },
        "queue": {"depth", "running", "limit"},
        "jobs": {"completed_total", "failed_total", "cancelled_total", "requeued_total"},
    }
    rows = {
        "devices": {
            *("id", "name", "total_bytes", "free_bytes"),
            *("budget_bytes", "resident_bytes", "ring_bytes"),
        },
        "models": {"name", "pipeline", "state", "offload", "components"},
        "workers": {"device", "pid", "state", "restarts_total"},
        "clients": set(),
    }
    assert set(stats) == set(keys) | set(rows)
    for key, names in keys.items():
        assert names <= set(stats[key])
    for key, names in rows.items():
        assert stats[key]
        assert all(names <= set(row) for row in stats[key])
    assert stats["daemon"]["pid"] == os.getpid()
    assert stats["daemon"]["state"] == "ready"
    assert stats["devices"][0]["total_bytes"] == 1000
