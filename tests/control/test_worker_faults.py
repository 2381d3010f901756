"""A worker that dies is replaced, and its job runs again, unless it caused two deaths."""

from __future__ import annotations

import os
import re
import signal

import pytest
from control.conftest import QUICK, Serve, WireClient, until

from offload_protocol.errors import WorkerCrashed
from offload_protocol.messages import Cancel, Load, Models, Stats
from offload_protocol.records import ErrorInfo
from offloadd.control.workers.supervisor import Patience


async def failure(client: WireClient, job: str) -> ErrorInfo:
    finished, _ = await client.end_of(job)
    assert finished.state == "failed"
    assert finished.error is not None
    return finished.error


async def ready(client: WireClient) -> int:
    """Wait for a worker and give its process id."""
    pid = 0

    async def is_ready() -> bool:
        nonlocal pid
        (worker,) = (await client.ask(Stats))["workers"]
        pid = worker["pid"] or 0
        return bool(worker["state"] == "ready")

    await until(is_ready)
    return pid


@pytest.mark.parametrize(
    ("prompt", "details", "says"),
    [
        ("exit 3", {"exit_code": 3, "last_line": "the last words"}, "exit code 3.*the last words"),
        ("exit 21", {"exit_code": 21, "last_line": "the last words"}, "exit code 21"),
        ("kill SIGSEGV", {"signal": "SIGSEGV", "last_line": ""}, "killed by SIGSEGV"),
    ],
)
async def test_case_27_a_job_that_killed_two_workers_fails_and_the_next_one_runs(
    serve: Serve, prompt: str, details: dict[str, object], says: str
) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("dies", prompt)
        await client.submit("waits")
        error = await failure(client, "dies")
        assert error.code == "worker_crashed"
        assert error.details == details
        finished, _ = await client.end_of("waits")
        assert finished.state == "done"
        stats = await client.ask(Stats)
        (worker,) = stats["workers"]
        assert worker["restarts_total"] == 2
        assert worker["state"] == "ready"
        assert re.search(says, worker["last_error"])
        assert stats["jobs"]["failed_total"] == 1
        assert stats["jobs"]["requeued_total"] == 1


async def test_a_worker_killed_from_outside_costs_its_job_nothing(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("long", "steps 100", seed=5)
        for _ in range(3):
            client.progress.clear()
            await client.read_until_running("long")
            os.kill(await ready(client), signal.SIGKILL)
        finished, _ = await client.end_of("long")
        assert finished.state == "done"
        stats = await client.ask(Stats)
        assert stats["jobs"]["requeued_total"] == 3
        assert stats["jobs"]["failed_total"] == 0


async def test_workers_killed_from_outside_however_often_do_not_make_the_device_failed(
    serve: Serve,
) -> None:
    async with serve() as rig:
        client = await rig.client()
        killed: set[int] = set()

        async def another_is_ready() -> bool:
            return await ready(client) not in killed

        for kill in range(QUICK.deaths_until_failed + 1):
            await until(another_is_ready)
            worker = await ready(client)
            killed.add(worker)
            os.kill(worker, signal.SIGKILL)
            await client.submit(f"job-{kill}")
        for kill in range(QUICK.deaths_until_failed + 1):
            finished, _ = await client.end_of(f"job-{kill}")
            assert finished.state == "done"


async def test_a_job_that_was_to_be_cancelled_is_not_run_again(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", "deaf")
        pid = await ready(client)
        await client.ask(Cancel, job="a")
        os.kill(pid, signal.SIGKILL)
        finished, _ = await client.end_of("a")
        assert finished.state == "cancelled"


async def test_a_job_that_makes_the_worker_speak_nonsense_fails(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", "garbage")
        assert (await failure(client, "a")).code == "worker_crashed"
        await client.submit("b")
        finished, _ = await client.end_of("b")
        assert finished.state == "done"


async def test_a_job_that_was_to_be_brief_is_accepted_whatever_becomes_of_it(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        # What it took makes the daemon expect that the others end at once, too.
        await client.submit("brief")
        await client.end_of("brief")
        assert (await client.submit("long", "hang"))["state"] == "running"
        await client.ask(Cancel, job="long")
        assert (await client.end_of("long"))[0].state == "cancelled"
        await client.submit("again")
        await client.end_of("again")
        assert (await client.submit("deadly", "exit 3"))["job"] == "deadly"
        assert (await failure(client, "deadly")).code == "worker_crashed"


async def test_an_idle_workers_death_is_noticed(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        first = await ready(client)
        os.kill(first, signal.SIGKILL)

        async def is_replaced() -> bool:
            return await ready(client) != first

        await until(is_replaced)
        await client.submit("a")
        finished, _ = await client.end_of("a")
        assert finished.state == "done"


async def test_loaded_models_come_back_with_a_new_worker(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.ask(Load, name="good")
        await client.ask(Load, name="added", source="/other")
        await client.submit("dies", "exit 1")
        await failure(client, "dies")

        async def are_loaded() -> bool:
            models = (await client.ask(Models))["models"]
            return {one["name"] for one in models if one["state"] == "ready"} == {"good", "added"}

        await until(are_loaded)
        await client.submit("a", model="added")
        finished, _ = await client.end_of("a")
        assert finished.state == "done"


async def test_a_model_whose_loading_kills_the_worker_is_not_loaded_again(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        with pytest.raises(WorkerCrashed, match="SIGSEGV; its last line: loading was too much"):
            await client.ask(Load, name="deadly", source="/deadly")
        await ready(client)
        rows = {one["name"]: one for one in (await client.ask(Models))["models"]}
        await client.submit("a")
        finished, _ = await client.end_of("a")
        assert finished.state == "done"
        assert (await client.ask(Stats))["workers"][0]["restarts_total"] == 1
        assert rows["deadly"]["state"] in ("failed", "registered")


async def test_a_worker_that_never_lives_makes_the_device_failed(serve: Serve) -> None:
    async with serve(worker=("--die-at-start",)) as rig:
        client = await rig.client()
        await client.submit("early")

        async def is_failed() -> bool:
            (worker,) = (await client.ask(Stats))["workers"]
            return bool(worker["state"] == "failed")

        await until(is_failed)
        (worker,) = (await client.ask(Stats))["workers"]
        assert worker["restarts_total"] >= QUICK.deaths_until_failed - 1
        assert "exit code 20; its last line: no device here" in worker["last_error"]
        with pytest.raises(WorkerCrashed, match=r"no worker stays alive: .*no device here"):
            await client.submit("a")
        with pytest.raises(WorkerCrashed, match="no worker stays alive"):
            await client.ask(Load, name="good")
        restarts = worker["restarts_total"]

        async def is_tried_again() -> bool:
            (worker,) = (await client.ask(Stats))["workers"]
            return bool(worker["restarts_total"] > restarts)

        await until(is_tried_again)


async def test_a_worker_that_hangs_at_its_channels_end_is_killed(serve: Serve) -> None:
    async with serve(patience=Patience(exit_s=0.2)) as rig:
        client = await rig.client()
        pid = await ready(client)
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
