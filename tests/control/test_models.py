"""Models are loaded once for all who ask, and unloaded only when no job needs them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from control.conftest import Serve, until

from offload_protocol.errors import Busy, InvalidRequest, ModelLoadFailed, UnknownModel
from offload_protocol.messages import Load, Models, Reply, Stats, Unload
from offloadd.channel.specs import ModelSpec


async def test_load_is_answered_when_the_model_is_ready(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        loaded = await client.ask(Load, name="slow")
        assert loaded["state"] == "ready"
        assert loaded["pipeline"] == "ScriptedPipeline"
        assert loaded["components"][0]["resident_bytes"] == 100
        models = (await client.ask(Stats))["models"]
        assert {one["name"]: one["state"] for one in models}["slow"] == "ready"
        assert (await client.ask(Load, name="slow"))["state"] == "ready"


async def test_case_43_simultaneous_loads_load_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with serve() as rig:
        clients = [await rig.client() for _ in range(5)]
        answers = await asyncio.gather(*(client.ask(Load, name="slow") for client in clients))
        assert [one["state"] for one in answers] == ["ready"] * 5
        await clients[0].ask(Load, name="slow")
    assert sum("loading slow" in record.message for record in caplog.records) == 1


async def test_case_43_a_job_between_load_and_unload_of_others_runs(serve: Serve) -> None:
    async with serve() as rig:
        one, two = await rig.client(), await rig.client()
        await one.ask(Load, name="good")
        await two.submit("a", "steps 20")
        await two.submit("b", "steps 5")
        await one.ask(Unload, name="good")
        for job in ("a", "b"):
            finished, _ = await two.end_of(job)
            assert finished.state == "done"


async def test_case_43_a_model_that_came_by_load_leaves_after_its_last_job(serve: Serve) -> None:
    async with serve() as rig:
        one, two = await rig.client(), await rig.client()
        await one.ask(Load, name="added", source="/other")
        await two.submit("a", "steps 30", model="added")
        await two.submit("b", "steps 5", model="added")
        await one.say(Unload(rid=1000, name="added"))

        attempts = itertools.count()

        async def is_leaving() -> bool:
            try:
                await two.submit(f"late{next(attempts)}", "steps 1", model="added")
            except UnknownModel:
                return True
            return False

        await until(is_leaving)
        with pytest.raises(Busy) as caught:
            await two.ask(Load, name="added", source="/other")
        assert caught.value.details["retry_after_s"] > 0
        for job in ("a", "b"):
            finished, _ = await two.end_of(job)
            assert finished.state == "done"
        assert isinstance(await one.answer(1000), Reply)
        names = [row["name"] for row in (await one.ask(Models))["models"]]
        assert "added" not in names


async def test_a_configured_model_stays_known_when_it_is_unloaded(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.ask(Load, name="good")
        assert (await client.ask(Unload, name="good"))["state"] == "registered"
        await client.submit("a")
        finished, _ = await client.end_of("a")
        assert finished.state == "done"


async def test_a_model_that_cannot_be_loaded_says_why_and_may_be_replaced(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        for source, says in (("/bad", "/bad is not a pipeline"), ("/broken", "is truncated")):
            with pytest.raises(ModelLoadFailed, match=says):
                await client.ask(Load, name="new", source=source)
        rows = {one["name"]: one for one in (await client.ask(Models))["models"]}
        assert rows["new"]["state"] == "failed"
        assert rows["new"]["error"]["code"] == "model_load_failed"
        assert (await client.ask(Load, name="new", source="/good"))["state"] == "ready"


async def test_jobs_on_a_model_that_cannot_be_hosted_are_refused_with_its_error(
    serve: Serve,
) -> None:
    async with serve() as rig:
        client = await rig.client()
        with pytest.raises(ModelLoadFailed):
            await client.ask(Load, name="bad")
        with pytest.raises(ModelLoadFailed, match="/bad is not a pipeline"):
            await client.submit("a", model="bad")


async def test_a_preloaded_model_is_loaded_at_the_start(serve: Serve) -> None:
    models = (ModelSpec(name="good", source="/good", preload=True),)
    async with serve(models=models) as rig:
        client = await rig.client()

        async def is_loaded() -> bool:
            (model,) = (await client.ask(Models))["models"]
            return bool(model["state"] == "ready")

        await until(is_loaded)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "good", "source": "/other"}, r"already hosted, from /good.*\[\[models\]\] entry"),
        ({"name": "n", "source": "./relative/path"}, "neither an absolute path, nor owner/name"),
        ({"name": "a b", "source": "/good"}, "is not a model name"),
        ({"name": "a\0b", "source": "/good"}, "is not a model name"),
        ({"name": "\x1b[2J", "source": "/good"}, "is not a model name"),
        ({"name": "n", "source": "/good", "options": {"ofload": "none"}}, "mean 'offload'"),
        ({"name": "n", "source": "/good", "options": {"dtype": "float8"}}, "not of its type"),
        ({"name": "good", "options": {"dtype": "float32"}}, "go with its source"),
    ],
)
async def test_a_load_that_makes_no_sense_is_refused(
    serve: Serve, fields: dict[str, Any], says: str
) -> None:
    async with serve() as rig:
        client = await rig.client()
        with pytest.raises(InvalidRequest, match=says):
            await client.ask(Load, **fields)
        assert len((await client.ask(Models))["models"]) == 5


async def test_unknown_models_are_neither_loaded_nor_unloaded(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        for kind in (Load, Unload):
            with pytest.raises(UnknownModel, match="did you mean 'good'"):
                await client.ask(kind, name="godo")


async def test_load_waits_for_a_worker_that_is_still_starting(serve: Serve) -> None:
    async with serve(worker=("--late-s", "0.3")) as rig:
        client = await rig.client()
        assert (await client.ask(Load, name="good"))["state"] == "ready"
