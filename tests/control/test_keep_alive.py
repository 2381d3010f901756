"""How long models stay in memory: the order of settings, pins, and the moments around an expiry."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from control.conftest import Serve, until
from control.plane import Plane

from offload_protocol.errors import ModelLoadFailed, Unauthorized, WorkerCrashed
from offload_protocol.messages import Load, Models, Pin, Unload, Unpin
from offload_protocol.records import ErrorInfo
from offloadd.channel.messages import ModelFailed, UnloadModel
from offloadd.channel.specs import ModelSpec
from offloadd.config import Config
from offloadd.control.clients.roles import Roles


@pytest.mark.parametrize(
    ("of_request", "of_model", "of_daemon", "stays_s"),
    [
        (None, None, 100.0, 100.0),
        (None, 50.0, 100.0, 50.0),
        (20.0, 50.0, 100.0, 20.0),
        (0.0, 50.0, 100.0, 0.0),
        (None, 0.0, 100.0, 0.0),
        (-1.0, 50.0, 100.0, None),
        (None, -1.0, 100.0, None),
        (None, None, -1.0, None),
        (20.0, -1.0, -1.0, 20.0),
    ],
)
def test_the_request_goes_before_the_model_and_the_model_before_the_daemon(
    of_request: float | None, of_model: float | None, of_daemon: float, stays_s: float | None
) -> None:
    plane = Plane(ModelSpec(name="m", source="/m", keep_alive=of_model), of_daemon)
    plane.draw("a", keep_alive_s=of_request)
    expires_at = None if stays_s is None else 1e9 + stays_s
    assert plane.model.expires_at == expires_at
    plane.now_s = 1e6 if stays_s is None else max(stays_s - 0.001, 0.0)
    plane.tick()
    plane.work()
    assert plane.in_memory == (stays_s != 0.0)
    if stays_s is not None:
        plane.now_s = stays_s
        plane.tick()
        plane.work()
        assert not plane.in_memory
        assert plane.model.reason.startswith("left: not used for ")
        assert plane.model.state == "registered"


def test_why_a_model_left_is_in_the_log_and_with_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plane = Plane(ModelSpec(name="m", source="/m"), default_s=5.0)
    plane.draw("a")
    plane.now_s = 60.0
    with caplog.at_level(logging.INFO, logger="offloadd.control"):
        plane.tick()
    plane.work()
    assert plane.model.reason.startswith("left: not used for ")
    assert [record.getMessage() for record in caplog.records] == [f"model m {plane.model.reason}"]


def test_a_model_that_went_with_its_worker_says_so() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"))
    plane.draw("a")
    assert plane.model.reason == "for a job"
    plane.models.worker_lost(WorkerCrashed("the worker process was killed by SIGSEGV"))
    assert plane.model.reason == "left: the worker process was killed by SIGSEGV"
    assert plane.model.state == "registered"


def test_each_use_begins_the_time_anew() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"))
    for _ in range(3):
        plane.draw(f"job{plane.now_s}")
        plane.now_s += 99.0
        plane.tick()
        plane.work()
        assert plane.in_memory


def test_a_model_is_not_asked_to_leave_while_a_job_needs_it() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"), default_s=0.0)
    plane.submit("a")
    plane.submit("b")
    plane.work()
    for _ in range(2):
        plane.now_s += 1000.0
        plane.tick()
        assert not any(isinstance(order, UnloadModel) for order in plane.orders)
        plane.end()
        plane.tick()
        if plane.orders:
            plane.work()


def test_keep_alive_boundary_a_thousand_requests_around_the_expiry_are_never_stuck() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"), default_s=100.0)
    source = random.Random(1)
    plane.draw("first")
    left = 0
    for number in range(1000):
        model = next(iter(plane.models))
        if model.idle_until_s is not None:
            plane.now_s = model.idle_until_s + source.choice((-1e-3, -1e-9, 0.0, 1e-9, 1e-3))
        # Clock, client and worker come in any order, and the worker may be in the middle of things.
        steps = [plane.tick, lambda: plane.work(source.randint(0, 2)), plane.tick]
        source.shuffle(steps)
        at = source.randint(0, len(steps))
        for place in range(len(steps) + 1):
            if place == at:
                job = plane.submit(f"job{number}")
            if place < len(steps):
                steps[place]()
        left += any(isinstance(order, UnloadModel) for order in plane.orders)
        plane.work()
        assert plane.in_memory, f"{number}: the model is not there"
        assert plane.running == job.key, f"{number}: the job does not run"
        plane.end()
        assert job.state == "done"
        plane.work()
    assert left > 100, "the expiry was hit"


# --- with a server ----------------------------------------------------------------------------


async def states(client: Any) -> dict[str, Any]:
    return {row["name"]: row for row in (await client.ask(Models))["models"]}


async def test_a_model_that_is_not_used_leaves_and_says_why(serve: Serve) -> None:
    config = Config.model_validate({"hosting": {"keep_alive": "200ms"}})
    async with serve(config) as rig:
        client = await rig.client()
        await client.ask(Load, name="good")
        await client.submit("a")
        await client.end_of("a")

        async def has_left() -> bool:
            return bool((await states(client))["good"]["reason"].startswith("left: not used"))

        await until(has_left)
        await client.submit("b")
        finished, _ = await client.end_of("b")
        assert finished.state == "done"


async def test_a_pinned_model_stays_until_it_is_unpinned(serve: Serve) -> None:
    config = Config.model_validate({"hosting": {"keep_alive": 0}})
    async with serve(config) as rig:
        client = await rig.client()
        pinned = await client.ask(Pin, name="good")
        assert (pinned["state"], pinned["pinned"], pinned["reason"]) == ("ready", True, "pinned")
        await client.submit("a")
        await client.end_of("a")
        await client.ask(Load, name="other")

        async def other_left() -> bool:
            return bool((await states(client))["other"]["state"] == "registered")

        await until(other_left)
        assert (await states(client))["good"]["state"] == "ready"
        assert (await client.ask(Unpin, name="good"))["pinned"] is False

        async def has_left() -> bool:
            return bool((await states(client))["good"]["state"] == "registered")

        await until(has_left)


async def test_a_pin_outlives_the_daemon(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.ask(Pin, name="good")
    async with serve() as rig:
        client = await rig.client()

        async def is_back() -> bool:
            row = (await states(client))["good"]
            return bool(row["state"] == "ready" and row["pinned"] and row["reason"] == "pinned")

        await until(is_back)
        await client.ask(Unpin, name="good")
    async with serve() as rig:
        client = await rig.client()
        assert not (await states(client))["good"]["pinned"]


async def test_unload_ends_a_pin(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.ask(Pin, name="good")
        row = await client.ask(Unload, name="good")
        assert (row["pinned"], row["reason"]) == (False, "left: a client unloaded it")


@pytest.mark.parametrize("kind", [Pin, Unpin])
async def test_pins_are_for_administrators(serve: Serve, kind: Any) -> None:
    async with serve(roles=Roles(frozenset({4242}))) as rig:
        client = await rig.client()
        with pytest.raises(Unauthorized):
            await client.ask(kind, name="good")


async def test_after_a_failed_load_jobs_are_refused_for_a_while_and_told_why(
    serve: Serve,
) -> None:
    async with serve() as rig:
        client = await rig.client()
        with pytest.raises(ModelLoadFailed):
            await client.ask(Load, name="broken")
        with pytest.raises(ModelLoadFailed, match="is truncated") as caught:
            await client.submit("a", model="broken")
        first_s = caught.value.details["retry_after_s"]
        assert 5 < first_s <= 10
        with pytest.raises(ModelLoadFailed):
            await client.ask(Load, name="broken")
        with pytest.raises(ModelLoadFailed) as caught:
            await client.submit("a", model="broken")
        assert caught.value.details["retry_after_s"] > first_s


def test_a_failed_load_is_tried_again_when_its_pause_is_over() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"))
    (model,) = plane.models
    error = ErrorInfo(code="model_load_failed", message="cannot")
    plane.models.failed(ModelFailed(name="m", error=error))
    with pytest.raises(ModelLoadFailed):
        plane.submit("early")
    plane.now_s = model.retry_at_s
    plane.draw("late")
    assert model.failures == 0
