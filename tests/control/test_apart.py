"""Where it is not clear of what a worker died, nobody is struck, and each is alone from then on."""

from __future__ import annotations

import os
import signal

import pytest
from control.conftest import MODELS, Rig, Serve, WireClient, until
from control.test_worker_faults import failure

from offload_protocol.errors import WorkerCrashed
from offload_protocol.messages import Load, Stats
from offloadd.channel.specs import ModelSpec
from offloadd.control.jobs.jobs import Job
from offloadd.control.workers.deaths import MAX_KILLS

WITH_DEADLY = (*MODELS, ModelSpec(name="deadly", source="/deadly"))


async def other_program(rig: Rig) -> WireClient:
    client = rig.stranger()
    await client.hello(program="other")
    return client


def found(rig: Rig, name: str) -> Job:
    (job,) = [job for job in rig.server._dispatcher.table if job.request.job == name]
    return job


async def test_a_job_whose_model_kills_beside_another_is_found_out_and_the_other_is_not_struck(
    serve: Serve,
) -> None:
    async with serve(models=WITH_DEADLY) as rig:
        client, other = await rig.client(), await other_program(rig)
        await client.submit("long", "steps 60")
        await client.read_until_running("long")
        await other.submit("deadly", model="deadly")
        error = await failure(other, "deadly")
        assert error.code == "worker_crashed"
        assert error.details["signal"] == "SIGSEGV"
        finished, _ = await client.end_of("long")
        assert finished.state == "done"
        assert (found(rig, "long").strikes, found(rig, "deadly").strikes) == (0, 2)
        stats = await client.ask(Stats)
        assert stats["workers"][0]["restarts_total"] == 3
        # Both after the first death, and after the second only the one that was alone then.
        assert stats["jobs"]["requeued_total"] == 3


async def test_a_load_that_a_client_asked_for_does_not_strike_the_job_that_runs(
    serve: Serve,
) -> None:
    async with serve(models=WITH_DEADLY) as rig:
        client, other = await rig.client(), await other_program(rig)
        await client.submit("long", "steps 60")
        await client.read_until_running("long")
        for _ in range(2):
            with pytest.raises(WorkerCrashed, match="loading was too much"):
                await other.ask(Load, name="deadly")
            client.progress.clear()
            await client.read_until_running("long")
        assert (found(rig, "long").strikes, found(rig, "long").kills) == (0, 2)
        finished, _ = await client.end_of("long")
        assert finished.state == "done"


async def test_a_job_that_is_alone_has_no_model_loaded_beside_it(serve: Serve) -> None:
    async with serve() as rig:
        client, other = await rig.client(), await other_program(rig)
        await client.submit("alone", "steps 60")
        found(rig, "alone").is_alone = True
        await client.read_until_running("alone")
        await other.submit("another", model="other")
        assert found(rig, "another").state == "queued"
        await other.end_of("another")
        finished, _ = await client.end_of("alone")
        assert finished.state == "done"


async def kill_beside(rig: Rig, name: str, times: int) -> None:
    """Kill the worker so often while a job has the device, and see each kill counted."""
    for _ in range(times):
        job = found(rig, name)
        before = job.kills

        async def is_running(job: Job = job) -> bool:
            return job.state == "running"

        async def is_counted(job: Job = job, before: int = before) -> bool:
            return job.kills > before

        await until(is_running)
        worker = rig.server._supervisor.pid
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        await until(is_counted)


async def test_kills_from_outside_are_counted_across_daemons_and_end_a_job_at_last(
    serve: Serve,
) -> None:
    async with serve() as rig:
        client = await rig.client("session")
        await client.submit("endless", "hang")
        await kill_beside(rig, "endless", 2)
    async with serve() as rig:
        client = await rig.client("session")
        await kill_beside(rig, "endless", MAX_KILLS - 2)
        error = await failure(client, "endless")
        assert error.code == "worker_crashed"
        assert error.details["kills"] == MAX_KILLS
