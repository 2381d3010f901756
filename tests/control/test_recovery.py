"""A daemon that starts on an earlier one's journal: what waited runs, what ended waits."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import zmq.asyncio
from control.conftest import Serve, until
from control.plane import Plane
from control.processes import Daemon, connected, running_job
from msgspec.structs import replace

from offload_protocol import codec
from offload_protocol.errors import (
    IdConflict,
    ShuttingDown,
    StorageFailed,
    Unauthorized,
    UnknownJob,
)
from offload_protocol.messages import (
    Cancel,
    Drain,
    Fetch,
    Finished,
    Jobs,
    Load,
    Models,
    Stats,
    Submit,
    Taken,
)
from offloadd.channel.specs import ModelSpec
from offloadd.config import Config
from offloadd.control.clients.leases import Leases
from offloadd.control.clients.roles import Roles
from offloadd.control.jobs.recovery import recover
from offloadd.control.journal.frames import FrameFile
from offloadd.control.journal.reading import Accepted, OpenJob, Recovered

IMAGE = {"$image": 0, "mode": "RGB", "size": [100, 200]}
PIXELS = bytes(range(240)) * 250


async def test_a_killed_daemon_loses_no_job(
    tmp_path: Path, endpoint: str, context: zmq.asyncio.Context, daemons: list[Daemon]
) -> None:
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    client = await connected(context, daemon)
    image = {"prompt": "echo", "image": IMAGE}
    await client.ask(Submit, [PIXELS], job="ended", model="good", arguments=image)
    first, _ = await client.end_of("ended")
    await client.submit("taken")
    await client.end_of("taken")
    await client.ask(Taken, job="taken")
    await running_job(client, "steps 200")
    await client.ask(Submit, [PIXELS], job="waits", model="good", arguments=image)
    daemon.process.kill()
    await daemon.ended()
    client.socket.close(linger=0)

    daemons.append(again := Daemon(tmp_path, endpoint))
    client = await connected(context, again)
    rows = {row["job"]: row["state"] for row in (await client.ask(Jobs))["jobs"]}
    assert rows["ended"] == rows["taken"] == "done"
    await client.ask(Fetch, job="ended")
    finished, frames = await client.end_of("ended")
    assert codec.plain(finished) == codec.plain(first)
    assert frames == [PIXELS]
    with pytest.raises(UnknownJob, match="was taken"):
        await client.ask(Fetch, job="taken")
    for job in ("runs", "waits"):
        await client.ask(Fetch, job=job)
        finished, frames = await client.end_of(job)
        assert finished.state == "done"
    assert frames == [PIXELS]
    with pytest.raises(IdConflict):
        await client.submit("waits", "another")
    client.socket.close(linger=0)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
async def test_a_job_that_was_cancelled_while_it_could_not_stop_does_not_run_again(
    stop: signal.Signals,
    tmp_path: Path,
    endpoint: str,
    context: zmq.asyncio.Context,
    daemons: list[Daemon],
) -> None:
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    client = await connected(context, daemon)
    await running_job(client, "deaf")
    await client.ask(Cancel, job="runs")
    daemon.process.send_signal(stop)
    await daemon.ended()
    client.socket.close(linger=0)
    daemons.append(again := Daemon(tmp_path, endpoint))
    client = await connected(context, again)
    await client.ask(Fetch, job="runs")
    finished, _ = await client.end_of("runs")
    assert finished.state == "cancelled"
    assert finished.error is not None
    assert finished.error.code == "cancelled"
    client.socket.close(linger=0)


async def test_a_drawn_seed_is_the_same_after_a_restart(
    tmp_path: Path, endpoint: str, context: zmq.asyncio.Context, daemons: list[Daemon]
) -> None:
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    client = await connected(context, daemon)
    await running_job(client, "deaf")
    await client.submit("waits")
    daemon.process.kill()
    await daemon.ended()
    client.socket.close(linger=0)
    with closing(sqlite3.connect(tmp_path / "state" / "journal.db")) as journal:
        (seed,) = journal.execute("SELECT seed FROM jobs WHERE job = 'waits'").fetchone()
    daemons.append(again := Daemon(tmp_path, endpoint))
    client = await connected(context, again)

    async def runs_again() -> bool:
        return bool((await client.ask(Stats))["queue"]["running"])

    await until(runs_again)
    pid = int((await client.ask(Stats))["workers"][0]["pid"])
    await client.ask(Cancel, job="runs")
    os.kill(pid, signal.SIGKILL)
    await client.ask(Fetch, job="waits")
    finished, _ = await client.end_of("waits")
    assert finished.outcome is not None
    assert finished.outcome.seeds == [seed]
    client.socket.close(linger=0)


async def test_a_model_that_came_by_load_is_hosted_again(
    tmp_path: Path, endpoint: str, context: zmq.asyncio.Context, daemons: list[Daemon]
) -> None:
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    client = await connected(context, daemon)
    await client.ask(Load, name="added", source="/good")
    await running_job(client, "steps 100")
    await client.submit("on-added", model="added")
    daemon.process.kill()
    await daemon.ended()
    client.socket.close(linger=0)
    daemons.append(again := Daemon(tmp_path, endpoint))
    client = await connected(context, again)
    names = [row["name"] for row in (await client.ask(Models))["models"]]
    assert "added" in names
    await client.ask(Fetch, job="on-added")
    finished, _ = await client.end_of("on-added")
    assert finished.state == "done"
    client.socket.close(linger=0)


async def test_a_damaged_journal_keeps_the_daemon_from_starting_and_is_left_as_it_is(
    tmp_path: Path, endpoint: str, daemons: list[Daemon]
) -> None:
    (tmp_path / "state").mkdir()
    path = tmp_path / "state" / "journal.db"
    path.write_bytes(b"something else" * 1000)
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    assert await daemon.ended() == 1
    said = daemon.log.read_text()
    assert f"the journal {path} is damaged" in said
    assert "Traceback" not in said
    assert path.read_bytes() == b"something else" * 1000
    assert not list(tmp_path.glob("offloadd.sock*"))


async def test_a_job_that_cannot_be_written_is_refused_and_others_go_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("runs", "steps 60")
        await client.submit("waits")
        with monkeypatch.context() as full:
            full.setattr(FrameFile, "write", _no_space)
            arguments = {"prompt": "echo", "image": IMAGE}
            with pytest.raises(StorageFailed, match="No space left"):
                await client.ask(Submit, [PIXELS], job="a", model="good", arguments=arguments)
        with pytest.raises(UnknownJob):
            await client.ask(Fetch, job="a")
        await client.ask(Submit, [PIXELS], job="a", model="good", arguments=arguments)
        for job in ("runs", "waits", "a"):
            finished, _ = await client.end_of(job)
            assert finished.state == "done"


async def test_a_result_that_cannot_be_written_is_delivered_all_the_same(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as rig:
        client = await rig.client()
        with monkeypatch.context() as full:
            full.setattr(FrameFile, "write", _no_space)
            await client.submit("a", "big 100000")
            _, frames = await client.end_of("a")
            assert frames == [bytes(100_000)]


def _no_space(self: FrameFile, frames: object, durable: bool) -> None:
    raise OSError(28, "No space left on device")


async def test_drain_refuses_new_jobs_and_is_answered_when_the_last_has_ended(
    serve: Serve,
) -> None:
    async with serve() as rig:
        client, other = await rig.client(), await rig.client()
        await client.submit("runs", "steps 30")
        await client.submit("waits", "steps 10")
        draining = asyncio.create_task(other.ask(Drain))
        third = await rig.client()

        async def is_draining() -> bool:
            return bool((await third.ask(Stats))["daemon"]["state"] == "draining")

        await until(is_draining)
        with pytest.raises(ShuttingDown, match="drains it"):
            await third.submit("late")
        assert not draining.done()
        for job in ("runs", "waits"):
            finished, _ = await client.end_of(job)
            assert finished.state == "done"
        assert await asyncio.wait_for(draining, 5) == {}


async def test_an_idle_daemon_is_drained_at_once(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        assert await client.ask(Drain) == {}


async def test_draining_is_for_administrators(serve: Serve) -> None:
    async with serve(roles=Roles(frozenset({4242}))) as rig:
        client = await rig.client()
        with pytest.raises(Unauthorized):
            await client.ask(Drain)
        await client.submit("a")
        await client.end_of("a")


async def test_results_on_disk_are_bounded(serve: Serve, tmp_path: Path) -> None:
    config = Config.model_validate({"results": {"max_bytes": 250_000}})
    async with serve(config) as rig:
        client = await rig.client()
        for number in range(6):
            await client.submit(f"job{number}", "big 100000")
            await client.end_of(f"job{number}")

        async def is_bounded() -> bool:
            files = (tmp_path / "frames").glob("*.result")
            return sum(path.stat().st_size for path in files) <= 250_000

        await until(is_bounded)
        await client.ask(Fetch, job="job0")
        finished, _ = await client.end_of("job0")
        assert finished.error is not None
        assert finished.error.code == "storage_failed"
        await client.ask(Fetch, job="job5")
        _, frames = await client.end_of("job5")
        assert frames == [bytes(100_000)]


def recovered(name: str, **fields: object) -> OpenJob:
    request = Submit(rid=1, job=name, model="m", **fields)  # type: ignore[arg-type]
    accepted = Accepted(1, "7", f"7:of-{name}", "p", request, b"", 1, 5, 1e9 - 100.0)
    return OpenJob(accepted, ())


def test_a_start_renews_the_lease_of_every_client() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"))
    jobs = Recovered(open=(recovered("attached"), recovered("detached", detached=True)))
    leases = Leases()
    recover(jobs, plane.dispatcher, plane.endings, leases, 30.0, plane.clocks)
    assert leases.expired(29.9) == []
    assert leases.expired(30.0) == ["7:of-attached"]
    plane.dispatcher.client_gone("7:of-attached")
    plane.dispatcher.client_gone("7:of-detached")
    states = {job.request.job: job.state for job in plane.dispatcher.table}
    assert states == {"attached": "cancelled", "detached": "queued"}


def test_the_time_that_a_daemon_was_down_counts_as_waiting() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"))
    jobs = Recovered(open=(recovered("a", queue_timeout_s=99.0), recovered("b")))
    recover(jobs, plane.dispatcher, plane.endings, Leases(), 30.0, plane.clocks)
    plane.dispatcher.tick()
    states = {job.request.job: job.state for job in plane.dispatcher.table}
    assert states == {"a": "failed", "b": "loading"}, "the other is in time, and starts"


def test_a_job_whose_arguments_are_lost_or_whose_model_is_gone_says_so() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"))
    lost = OpenJob(recovered("lost").accepted, StorageFailed("the file is gone"))
    gone = recovered("gone")
    request = Submit(rid=1, job="gone", model="no longer there")
    gone = OpenJob(replace(gone.accepted, request=request), ())
    recover(
        Recovered(open=(lost, gone)), plane.dispatcher, plane.endings, Leases(), 30.0, plane.clocks
    )
    codes = {}
    for name in ("lost", "gone"):
        result = plane.endings.results.get(f"7/{name}")
        assert result is not None
        finished = codec.decode_answer(result.body)
        assert isinstance(finished, Finished)
        assert finished.error is not None
        codes[name] = finished.error.code
    assert codes == {"lost": "storage_failed", "gone": "unknown_model"}
