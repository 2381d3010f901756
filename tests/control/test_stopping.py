"""The daemon as a process: how it starts, answers systemd, and stops when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import zmq.asyncio
from client.stopping import wait_until_stopped
from control.conftest import WireClient, until
from control.processes import Daemon, connected, running_job

from offload_protocol.errors import ShuttingDown
from offload_protocol.messages import Fetch, Stats


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_during_a_job_ends_everything_in_order_and_loses_no_job(
    tmp_path: Path,
    endpoint: str,
    context: zmq.asyncio.Context,
    daemons: list[Daemon],
    number: signal.Signals,
) -> None:
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    client = await connected(context, daemon)
    worker = await running_job(client, "steps 300")
    await client.submit("waits")
    began_s = time.monotonic()
    daemon.process.send_signal(number)
    assert await daemon.ended() == 0
    assert time.monotonic() - began_s < 10
    assert daemon.worker_is_gone(worker)
    assert not list(tmp_path.glob("offloadd.sock*"))
    assert "Traceback" not in daemon.log.read_text()
    assert client.finished == {}
    client.socket.close(linger=0)
    daemons.append(again := Daemon(tmp_path, endpoint))
    client = await connected(context, again)
    for job in ("runs", "waits"):
        await client.ask(Fetch, job=job)
        finished, _ = await client.end_of(job)
        assert finished.state == "done"
    client.socket.close(linger=0)


async def test_a_stopping_daemon_takes_no_new_work_but_answers(
    tmp_path: Path, endpoint: str, context: zmq.asyncio.Context, daemons: list[Daemon]
) -> None:
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    client = await connected(context, daemon)
    worker = await running_job(client, "deaf")
    # A worker that stands still is given a while, in which the daemon goes on answering. One that
    # the stop has not reached yet would hear that its channel closes, and end at once.
    os.kill(worker, signal.SIGSTOP)
    wait_until_stopped(worker)
    daemon.process.send_signal(signal.SIGTERM)

    async def is_stopping() -> bool:
        return bool((await client.ask(Stats))["daemon"]["state"] == "stopping")

    await until(is_stopping)
    with pytest.raises(ShuttingDown):
        await client.submit("late")
    assert await daemon.ended() == 0
    assert daemon.worker_is_gone(worker)
    client.socket.close(linger=0)


async def test_a_second_signal_ends_it_at_once(
    tmp_path: Path, endpoint: str, context: zmq.asyncio.Context, daemons: list[Daemon]
) -> None:
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    client = await connected(context, daemon)
    worker = await running_job(client, "deaf")
    os.kill(worker, signal.SIGSTOP)
    wait_until_stopped(worker)
    began_s = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)

    async def is_stopping() -> bool:
        return bool((await client.ask(Stats))["daemon"]["state"] == "stopping")

    await until(is_stopping)
    daemon.process.send_signal(signal.SIGTERM)
    assert await daemon.ended() == 130
    assert time.monotonic() - began_s < 3
    assert not list(tmp_path.glob("offloadd.sock*"))
    # The daemon may have ended it already: a stopped process dies of SIGKILL without going on.
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)

    async def is_gone() -> bool:
        return daemon.worker_is_gone(worker)

    await until(is_gone)
    client.socket.close(linger=0)


async def test_case_39_a_second_daemon_says_who_is_there_and_leaves_it_alone(
    tmp_path: Path, endpoint: str, context: zmq.asyncio.Context, daemons: list[Daemon]
) -> None:
    daemons.append(first := Daemon(tmp_path, endpoint))
    client = await connected(context, first)
    (tmp_path / "second").mkdir()
    daemons.append(second := Daemon(tmp_path / "second", endpoint))
    assert await second.ended() == 1
    said = second.log.read_text()
    assert f"process {first.process.pid}" in said
    assert len(said.splitlines()) == 1
    newcomer = WireClient(context, endpoint, "another")
    await newcomer.hello()
    assert (await newcomer.ask(Stats))["daemon"]["pid"] == first.process.pid
    for one in (client, newcomer):
        one.socket.close(linger=0)


async def test_a_killed_daemon_takes_its_worker_along_and_the_next_one_starts(
    tmp_path: Path, endpoint: str, context: zmq.asyncio.Context, daemons: list[Daemon]
) -> None:
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    client = await connected(context, daemon)
    worker = await running_job(client, "deaf")
    daemon.process.kill()
    await daemon.ended()

    async def is_gone() -> bool:
        return daemon.worker_is_gone(worker)

    await until(is_gone)
    client.socket.close(linger=0)
    daemons.append(again := Daemon(tmp_path, endpoint))
    client = await connected(context, again)
    assert (await client.ask(Stats))["daemon"]["pid"] == again.process.pid
    client.socket.close(linger=0)


async def test_systemd_is_told_of_start_life_and_stop(
    tmp_path: Path, endpoint: str, context: zmq.asyncio.Context, daemons: list[Daemon]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        told: list[str] = []

        def told_until(text: str) -> None:
            while not any(text in one for one in told):
                told.append(systemd.recv(4096).decode())

        notify = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        daemons.append(daemon := Daemon(tmp_path, endpoint, **notify))
        await asyncio.to_thread(told_until, "READY=1")
        client = await connected(context, daemon)
        stats = await client.ask(Stats)
        assert stats["workers"][0]["state"] == "ready"
        assert "STATUS=Serving on cpu (scripted)" in "".join(told)
        told.clear()
        for _ in range(3):
            await asyncio.to_thread(told_until, "WATCHDOG=1")
            told.clear()
        daemon.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(told_until, "STOPPING=1")
        assert await daemon.ended() == 0
        client.socket.close(linger=0)


async def test_stats_are_answered_within_a_second_of_the_start(
    tmp_path: Path, endpoint: str, context: zmq.asyncio.Context, daemons: list[Daemon]
) -> None:
    began_s = time.monotonic()
    daemons.append(daemon := Daemon(tmp_path, endpoint))
    client = await connected(context, daemon)
    await client.ask(Stats)
    took_s = time.monotonic() - began_s
    client.socket.close(linger=0)
    # What this machine's other work does to a start is not the daemon's: its own time counts.
    used = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    used_s = (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")
    assert used_s < 1.0, f"{used_s} s of processor time, {took_s} s by the clock"
