"""A running job gives way to whom the device is owed, and goes on; nothing is lost on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from control.conftest import Rig, Serve, WireClient, until
from control.plane import OWNER, Plane

from offload_protocol.messages import Cancel, Jobs, Stats, Unload
from offload_protocol.records import ErrorInfo
from offloadd.channel.messages import (
    CancelJob,
    GiveWay,
    JobEnded,
    JobStays,
    ResumeJob,
    UnloadModel,
)
from offloadd.channel.specs import ModelSpec
from offloadd.config import Config
from offloadd.control.jobs.jobs import Job, Owner

OTHERS = [Owner("2", "2:s", "q"), Owner("3", "3:s", "r"), Owner("4", "4:s", "s")]


@pytest.fixture
def plane() -> Plane:
    """A long job has the device since a second."""
    plane = Plane(ModelSpec(name="m", source="/m"))
    plane.submit("long")
    plane.work()
    plane.now_s += 1.0
    return plane


def job(plane: Plane, name: str, owner: Owner = OWNER) -> Job:
    found = plane.dispatcher.table.find(owner.user, name, administrates=False)
    assert found is not None
    return found


def asked(plane: Plane) -> bool:
    return any(isinstance(order, GiveWay) for order in plane.orders)


# --- on a fake clock --------------------------------------------------------------------------


def test_case_41_a_job_gives_way_and_goes_on_where_it_was(plane: Plane) -> None:
    plane.submit("short", OTHERS[0])
    assert asked(plane)
    plane.work()
    assert plane.running == job(plane, "short", OTHERS[0]).key
    assert job(plane, "long").state == "parked"
    plane.now_s += 0.25
    plane.end()
    assert [type(order) for order in plane.orders] == [ResumeJob]
    plane.work()
    assert (plane.running, job(plane, "long").state) == (job(plane, "long").key, "running")
    timings = job(plane, "long").timings(plane.now_s)
    assert (timings.running_s, timings.parked_s) == (1.0, 0.25)


def test_jobs_of_the_same_program_wait_for_each_other(plane: Plane) -> None:
    plane.submit("next")
    plane.tick()
    assert not asked(plane)


def test_a_job_is_asked_once_until_it_has_answered(plane: Plane) -> None:
    plane.submit("short", OTHERS[0])
    plane.orders.clear()
    plane.submit("other", OTHERS[1])
    plane.tick()
    assert plane.orders == []


def test_a_job_that_cannot_give_way_is_asked_again_after_a_while(plane: Plane) -> None:
    plane.submit("short", OTHERS[0])
    plane.orders.clear()
    plane.dispatcher.stays(JobStays(job=job(plane, "long").key))
    plane.tick()
    assert not asked(plane)
    plane.now_s += 2.0
    plane.tick()
    assert asked(plane)


def test_a_job_that_ends_before_it_could_give_way_is_just_done(plane: Plane) -> None:
    plane.submit("short", OTHERS[0])
    plane.orders.clear()
    plane.end()
    plane.work()
    assert job(plane, "long").state == "done"
    assert plane.running == job(plane, "short", OTHERS[0]).key


def test_at_most_so_many_jobs_are_parked() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"), max_parked=2)
    owners = [OWNER, *OTHERS]
    for priority, owner in enumerate(owners):
        plane.submit("j", owner, priority=priority)
        plane.work()
    # The first two gave way to the next; the third had to go on.
    states = [job(plane, "j", owner).state for owner in owners]
    assert states == ["parked", "parked", "running", "queued"]
    for owner in (OTHERS[1], OTHERS[2], OTHERS[0], OWNER):
        assert plane.running == job(plane, "j", owner).key
        plane.end()
        plane.work()
    assert {job(plane, "j", owner).state for owner in owners} == {"done"}


def test_where_none_may_be_parked_none_gives_way() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"), max_parked=0)
    plane.submit("long")
    plane.work()
    plane.now_s += 1.0
    plane.submit("short", OTHERS[0], priority=9)
    assert not asked(plane)


def test_case_31_a_parked_job_is_told_to_stop_and_ends_once(plane: Plane) -> None:
    plane.submit("short", OTHERS[0])
    plane.work()
    parked = job(plane, "long")
    plane.dispatcher.cancel(parked)
    plane.dispatcher.cancel(parked)
    assert CancelJob(job=parked.key) in plane.orders
    stopped = ErrorInfo(code="cancelled", message="stopped where it waited")
    plane.dispatcher.ended(JobEnded(job=parked.key, error=stopped), ())
    assert parked.state == "cancelled"
    plane.end()
    plane.work()
    assert plane.running is None
    assert plane.endings.totals.cancelled == 1


def test_the_time_to_run_is_time_with_the_device(plane: Plane) -> None:
    plane.submit("timed", OTHERS[0], run_timeout_s=5.0)
    plane.work()
    timed = job(plane, "timed", OTHERS[0])
    plane.now_s += 3.0
    plane.submit("other", OTHERS[1])
    plane.work()
    assert timed.state == "parked"
    plane.now_s += 60.0
    plane.tick()
    assert timed.stopping is None
    plane.end()
    plane.work()
    plane.end()
    plane.work()
    assert plane.running == timed.key
    plane.now_s += 2.5
    plane.tick()
    assert timed.stopping is not None


def test_case_43_a_model_leaves_when_no_job_is_in_the_middle_of_it() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"))
    model = next(iter(plane.models))
    plane.submit("long")
    plane.work()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def unload() -> Any:
        return plane.models.unload(model, True, plane.dispatcher.turns.uses("m"))

    waiter = loop.run_until_complete(unload())
    plane.submit("next", OTHERS[0])
    assert not any(isinstance(order, UnloadModel) for order in plane.orders)
    plane.end()
    (order,) = plane.orders
    assert isinstance(order, UnloadModel)
    assert not waiter.done()
    plane.work()
    assert waiter.done()
    assert plane.in_memory, "the next job has had it loaded again"
    assert plane.running == job(plane, "next", OTHERS[0]).key
    loop.close()


# --- with a worker process --------------------------------------------------------------------


async def other_program(rig: Rig, program: str) -> WireClient:
    client = rig.stranger()
    await client.hello(program=program)
    return client


async def states(client: WireClient) -> dict[str, str]:
    return {row["job"]: row["state"] for row in (await client.ask(Jobs))["jobs"]}


async def parked_behind(rig: Rig, name: str) -> tuple[WireClient, WireClient]:
    """The clients of a parked job and of one that has the device and does not end."""
    one, other = await other_program(rig, "one"), await other_program(rig, "other")
    await one.submit(name, "steps 60", seed=3)
    await one.read_until_running(name)
    await other.submit("holds", "hang", priority=1)

    async def is_parked() -> bool:
        return (await states(one))[name] == "parked"

    await until(is_parked)
    return one, other


async def test_parked_is_a_state_that_is_told(serve: Serve) -> None:
    async with serve() as rig:
        one, other = await parked_behind(rig, "long")
        queue = (await one.ask(Stats))["queue"]
        assert (queue["depth"], queue["running"], queue["parked"]) == (0, 1, 1)
        await other.ask(Cancel, job="holds")
        finished, _ = await one.end_of("long")
        assert finished.outcome is not None
        assert finished.outcome.timings.parked_s > 0
        told = [step.state for step in one.progress if step.job == "long"]
        assert told.index("parked") < len(told) - 1 - told[::-1].index("running")


async def test_a_parked_job_is_cancelled_by_its_owner(serve: Serve) -> None:
    async with serve() as rig:
        one, other = await parked_behind(rig, "long")
        await one.ask(Cancel, job="long")
        finished, _ = await one.end_of("long")
        assert finished.state == "cancelled"
        assert (await states(other))["holds"] == "running"


async def test_parked_jobs_survive_the_death_of_their_worker_without_a_strike(
    serve: Serve,
) -> None:
    async with serve() as rig:
        one, other = await parked_behind(rig, "long")
        (worker,) = (await one.ask(Stats))["workers"]
        os.kill(worker["pid"], signal.SIGSEGV)
        await other.ask(Cancel, job="holds")
        finished, _ = await one.end_of("long")
        assert finished.state == "done"
        (long_one,) = [job for job in rig.server._dispatcher.table if job.request.job == "long"]
        assert long_one.strikes == 0


async def test_a_daemon_that_stops_keeps_the_parked_job_for_the_next_one(serve: Serve) -> None:
    async with serve() as rig:
        await parked_behind(rig, "long")
    async with serve() as rig:
        client = await other_program(rig, "other")
        await client.ask(Cancel, job="holds")

        async def is_done() -> bool:
            return (await states(client))["long"] == "done"

        await until(is_done)


async def test_two_clients_on_one_device_are_served_by_turns(serve: Serve) -> None:
    async with serve() as rig:
        one, other = await other_program(rig, "one"), await other_program(rig, "other")
        await one.submit("long", "steps 200")
        await one.read_until_running("long")
        for number in range(5):
            await other.submit(f"short {number}".replace(" ", "-"), "steps 4")
            await other.end_of(f"short-{number}")
        assert (await states(one))["long"] in ("running", "parked")
        finished, _ = await one.end_of("long")
        assert finished.state == "done"


async def test_unload_waits_for_the_job_in_the_middle(serve: Serve) -> None:
    async with serve(Config()) as rig:
        one, _ = await parked_behind(rig, "long")
        unloading = asyncio.create_task(other_unload(rig))
        await asyncio.sleep(0.1)
        assert not unloading.done()
        await one.ask(Cancel, job="holds")
        finished, _ = await one.end_of("long")
        assert finished.state == "done"
        assert (await unloading)["state"] == "registered"


async def other_unload(rig: Rig) -> dict[str, Any]:
    client = await other_program(rig, "third")
    return await client.ask(Unload, name="good")
