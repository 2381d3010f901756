"""Cancelling hits exactly the job that is meant, in every state, and only by who may."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from control.conftest import Serve, until

from offload_protocol.errors import Busy, UnknownJob
from offload_protocol.messages import Cancel, Jobs, Stats, Submit, Taken
from offloadd.config import Config
from offloadd.control.clients.roles import Roles


async def test_case_32_cancelling_a_waiting_job_leaves_the_running_one_alone(serve: Serve) -> None:
    async with serve() as rig:
        one, two = await rig.client(), await rig.client()
        await one.submit("runs", "steps 30")
        await two.submit("waits", "steps 30")
        assert (await two.ask(Cancel, job="waits"))["state"] == "cancelled"
        finished, _ = await two.end_of("waits")
        assert finished.state == "cancelled"
        assert finished.error is not None
        assert finished.error.code == "cancelled"
        finished, _ = await one.end_of("runs")
        assert finished.state == "done"


async def test_case_32_a_running_job_stops_at_its_next_border(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", "hang")
        await client.read_until_running("a")
        await client.ask(Cancel, job="a")
        finished, _ = await client.end_of("a")
        assert finished.state == "cancelled"
        await client.submit("b")
        finished, _ = await client.end_of("b")
        assert finished.state == "done"


async def test_case_32_cancelling_again_or_after_the_end_changes_nothing(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("done")
        await client.end_of("done")
        assert (await client.ask(Cancel, job="done"))["state"] == "done"
        await client.submit("runs", "hang")
        await client.ask(Cancel, job="runs")
        await client.ask(Cancel, job="runs")
        await client.end_of("runs")
        assert (await client.ask(Cancel, job="runs"))["state"] == "cancelled"
        stats = await client.ask(Stats)
        assert stats["jobs"]["cancelled_total"] == 1


async def test_case_32_unknown_jobs_cannot_be_cancelled(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        with pytest.raises(UnknownJob, match="no job 'nothing' of yours"):
            await client.ask(Cancel, job="nothing")


async def test_case_32_a_cancelled_job_that_waits_for_a_worker_never_runs(serve: Serve) -> None:
    async with serve(worker=("--late-s", "0.5")) as rig:
        client = await rig.client()
        await client.submit("a", "exit 3")
        await client.ask(Cancel, job="a")
        await client.submit("b")
        finished, _ = await client.end_of("b")
        assert finished.state == "done"
        stats = await client.ask(Stats)
        assert stats["workers"][0]["restarts_total"] == 0


async def test_a_job_that_waits_too_long_fails(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("long", "hang")
        await client.submit("short", queue_timeout_s=0.2)
        finished, _ = await client.end_of("short")
        assert finished.state == "failed"
        assert finished.error is not None
        assert finished.error.code == "deadline_exceeded"
        assert finished.error.hint.startswith("allow more as ")
        assert "waited longer than 0.2 s" in finished.error.message


async def test_a_job_that_runs_too_long_is_stopped(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", "hang", run_timeout_s=0.2)
        finished, _ = await client.end_of("a")
        assert finished.state == "failed"
        assert finished.error is not None
        assert finished.error.code == "deadline_exceeded"
        assert finished.error.hint.startswith("allow more as ")
        stats = await client.ask(Stats)
        assert stats["jobs"]["failed_total"] == 1
        queue = {"depth": 0, "running": 0, "parked": 0, "loading": 0, "limit": 256}
        assert stats["queue"] == queue


async def test_a_full_queue_is_busy_until_a_job_leaves(serve: Serve) -> None:
    config = Config.model_validate({"queue": {"limit": 1}})
    async with serve(config) as rig:
        client = await rig.client()
        await client.submit("runs", "hang")

        async def is_running() -> bool:
            stats = await client.ask(Stats)
            return bool(stats["queue"]["running"])

        await until(is_running)
        await client.submit("waits")
        with pytest.raises(Busy) as caught:
            await client.submit("refused")
        assert caught.value.details["retry_after_s"] >= 1
        assert caught.value.details["depth"] == 1
        await client.ask(Cancel, job="waits")
        await client.submit("refused")


async def test_own_jobs_are_seen_from_every_program_of_a_user(serve: Serve) -> None:
    async with serve(roles=Roles(frozenset({os.getuid() + 1}))) as rig:
        one, two = await rig.client(), await rig.client()
        await one.submit("a", "hang")
        rows = (await two.ask(Jobs))["jobs"]
        assert [(row["job"], row["mine"], row["program"]) for row in rows] == [("a", True, "test")]
        await two.ask(Cancel, job="a")
        finished, _ = await one.end_of("a")
        assert finished.state == "cancelled"


async def test_many_jobs_cancelled_at_random_points_leave_nothing_behind(
    serve: Serve, tmp_path: Path
) -> None:
    source = random.Random(4)
    async with serve() as rig:
        client = await rig.client()
        image = {"$image": 0, "mode": "RGB", "size": [100, 100]}
        for number in range(200):
            job, prompt = f"job{number}", source.choice(["hang", "steps 2", "echo"])
            arguments = {"prompt": prompt, "image": image}
            await client.ask(Submit, [bytes(30_000)], job=job, model="good", arguments=arguments)
            await asyncio.sleep(source.choice([0.0, 0.0, 0.005, 0.02]))
            await client.ask(Cancel, job=job)
            await client.end_of(job)
            await client.ask(Taken, job=job)
        stats = await client.ask(Stats)
        assert (stats["queue"]["depth"], stats["queue"]["running"]) == (0, 0)
        assert stats["jobs"]["results_kept"] == stats["jobs"]["results_kept_bytes"] == 0
        assert stats["jobs"]["cancelled_total"] + stats["jobs"]["completed_total"] == 200
        await client.submit("next", seed=3)
        finished, _ = await client.end_of("next")
        assert finished.outcome is not None
        assert finished.outcome.seeds == [3]
    assert list((tmp_path / "frames").iterdir()) == []
