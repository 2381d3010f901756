"""Clients that leave: when their jobs are ended, and when they go on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest
from control.conftest import Serve, WireClient, until

from offload_protocol.messages import Cancel, Fetch, Jobs
from offloadd.config import Config
from offloadd.control.clients import leases
from offloadd.control.clients.leases import Leases


def test_a_client_that_left_is_waited_for_a_moment() -> None:
    one = Leases()
    one.left("a", 10.0)
    assert one.expired(10.0 + leases.RETURN_S - 0.01) == []
    assert one.expired(10.0 + leases.RETURN_S) == ["a"]
    assert one.expired(100.0) == []


def test_a_client_that_came_back_keeps_its_lease() -> None:
    one = Leases()
    one.left("a", 10.0)
    one.renew("b", 40.0)
    one.came("a")
    assert one.expired(39.9) == []
    one.came("b")
    assert one.expired(100.0) == []


async def state_of(client: WireClient, job: str) -> str:
    rows = {row["job"]: row["state"] for row in (await client.ask(Jobs))["jobs"]}
    return str(rows[job])


@pytest.fixture(autouse=True)
def short_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RETURN_S", 0.3)


async def test_case_33_the_jobs_of_a_client_that_has_gone_are_cancelled(serve: Serve) -> None:
    async with serve() as rig:
        client, other = await rig.client(), await rig.client()
        await client.submit("runs", "hang")
        await client.submit("waits", "hang")
        await client.read_until_running("runs")
        client.socket.close(linger=0)

        async def are_cancelled() -> bool:
            states = {await state_of(other, job) for job in ("runs", "waits")}
            return states == {"cancelled"}

        await until(are_cancelled)
        await other.submit("next")
        finished, _ = await other.end_of("next")
        assert finished.state == "done"


async def test_case_33_a_killed_client_costs_the_queue_nothing(serve: Serve) -> None:
    code = (
        "import sys, time\n"
        "from offload_client import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    jobs = [client.submit('good', 'hang') for _ in range(5)]\n"
        "    print('submitted', flush=True)\n"
        "    time.sleep(60)\n"
    )
    async with serve() as rig:
        client = await rig.client()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, rig.endpoint), stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await client.submit("mine")
        finished, _ = await client.end_of("mine")
        assert finished.state == "done"


async def test_a_client_that_comes_back_finds_its_jobs_running(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client("me")
        await client.submit("a", "steps 120")
        await client.read_until_running("a")
        client.socket.close(linger=0)
        again = await rig.client("me")
        await again.ask(Fetch, job="a")
        finished, _ = await again.end_of("a")
        assert finished.state == "done"


async def test_a_detached_job_goes_on_without_anybody(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", "steps 100", detached=True)
        client.socket.close(linger=0)
        await asyncio.sleep(0.8)
        other = await rig.client()
        await other.ask(Fetch, job="a")
        finished, _ = await other.end_of("a")
        assert finished.state == "done"


async def test_a_job_that_another_client_fetched_goes_on_for_that_one(serve: Serve) -> None:
    async with serve() as rig:
        client, other = await rig.client(), await rig.client()
        await client.submit("a", "hang")
        await other.ask(Fetch, job="a")
        client.socket.close(linger=0)
        await asyncio.sleep(0.8)
        assert await state_of(other, "a") != "cancelled"
        await other.ask(Cancel, job="a")
        await other.end_of("a")


SILENT = """
import sys, time
from offload_client import Client
with Client(sys.argv[1]) as client:
    client.submit("good", "hang", job_id=sys.argv[2])
    print("submitted", flush=True)
    time.sleep(60)
"""


async def test_a_client_that_stands_still_loses_its_lease_and_one_that_is_busy_does_not(
    serve: Serve,
) -> None:
    async with serve(Config.model_validate({"clients": {"lease": 10.0}})) as rig:
        watcher = await rig.client()
        clients = []
        for job in ("stopped", "busy"):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", SILENT, rig.endpoint, job), stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            await process.stdout.readline()
            clients.append(process)
        try:
            clients[0].send_signal(signal.SIGSTOP)
            began_s = time.monotonic()

            async def is_cancelled() -> bool:
                return await state_of(watcher, "stopped") == "cancelled"

            await until(is_cancelled, timeout_s=20.0)
            assert time.monotonic() - began_s < 12.0
            assert await state_of(watcher, "busy") != "cancelled"
        finally:
            for process in clients:
                process.send_signal(signal.SIGKILL)
                await process.wait()
