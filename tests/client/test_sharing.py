"""One client in many threads, in many tasks, in a forked child, under an interrupt."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from client.conftest import Twin
from client.peer import Caller, Peer, finished, ignore, info_of

from offload_client import AsyncClient, Client, InvalidRequest, TimedOut
from offload_protocol.messages import Submit


def hold(caller: Caller, request: Submit) -> None:
    """Accept a job and never end it."""
    caller.reply(request, info_of(request, "running"))


def test_threads_share_a_client_and_each_gets_its_own_answer(peer: Peer) -> None:
    def draw(number: int) -> tuple[int, str]:
        return number, client.generate("shapes", "x", job_id=f"job {number}").job

    with Client(peer.endpoint) as client, ThreadPoolExecutor(16) as threads:
        results = list(threads.map(draw, range(300)))
    assert results == [(number, f"job {number}") for number in range(300)]


def test_a_thread_that_waits_does_not_hold_up_the_others(
    start_peer: Callable[..., Peer],
) -> None:
    peer = start_peer(stats=ignore)
    with Client(peer.endpoint) as client, ThreadPoolExecutor(1) as threads:
        client.ping()
        waiting = threads.submit(client.stats, timeout_s=1.5)
        time.sleep(0.1)
        assert max(client.ping() for _ in range(20)) < 1.0
        assert isinstance(waiting.exception(), TimedOut)


def test_no_thread_is_started(peer: Peer) -> None:
    before = threading.active_count()
    with Client(peer.endpoint) as client:
        client.generate("shapes", "x")
        assert threading.active_count() == before


def test_closing_wakes_those_who_wait(start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(submit=hold, stats=ignore)
    client = Client(peer.endpoint)
    job = client.submit("shapes", "x")
    with ThreadPoolExecutor(3) as threads:
        calls: list[Callable[[], object]] = [job.result, client.stats, job.result]
        waits = [threads.submit(call) for call in calls]
        time.sleep(0.2)
        client.close()
        for wait in waits:
            with pytest.raises(InvalidRequest, match="closed"):
                wait.result(timeout=5)


async def test_closing_wakes_the_tasks_that_wait(start_peer: Callable[..., Peer]) -> None:
    client = AsyncClient(start_peer(submit=hold, stats=ignore).endpoint)
    job = await client.submit("shapes", "x")
    waits = [asyncio.create_task(job.result()), asyncio.create_task(client.stats())]
    await asyncio.sleep(0.1)
    await client.close()
    for wait in waits:
        with pytest.raises(InvalidRequest, match="closed"):
            await asyncio.wait_for(wait, 5)


async def test_many_tasks_share_a_client(peer: Peer) -> None:
    async with AsyncClient(peer.endpoint) as client:
        calls = (client.generate("shapes", "x", job_id=f"{number}") for number in range(200))
        results = await asyncio.gather(*calls)
    assert [result.job for result in results] == [str(number) for number in range(200)]


async def test_a_cancelled_task_cancels_its_job_and_harms_no_other(
    start_peer: Callable[..., Peer],
) -> None:
    peer = start_peer(submit=hold)
    async with AsyncClient(peer.endpoint) as client:
        drawing = asyncio.create_task(client.generate("shapes", "x"))
        await asyncio.sleep(0.1)
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        await client.ping()
        assert peer.count("cancel") == 1


async def test_a_job_can_be_awaited(peer: Peer) -> None:
    async with AsyncClient(peer.endpoint) as client:
        job = await client.submit("shapes", "x")
        assert (await job).seed == 7


async def test_on_progress_may_be_a_coroutine_function(peer: Peer) -> None:
    states: list[str] = []

    async def note(progress: object) -> None:
        await asyncio.sleep(0)
        states.append(str(progress))

    async with AsyncClient(peer.endpoint) as client:
        await client.generate("shapes", "x", on_progress=note)
    assert "done" in states[-1]


def test_a_client_of_another_loop_says_so(peer: Peer) -> None:
    client = AsyncClient(peer.endpoint)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(client.connect())
        with pytest.raises(InvalidRequest, match="another event loop"):
            second.run(client.connect())
        first.run(client.close())


def test_an_inherited_client_says_so_and_leaves_the_parents_alone(twin: Twin, peer: Peer) -> None:
    client = twin.client(peer.endpoint)
    twin.do(client.ping())
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks beside threads; that is what is tried here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            twin.do(client.ping())
        except InvalidRequest as error:
            twin.do(client.close())
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert "forked child" in pipe.read()
    os.waitpid(child, 0)
    twin.do(client.ping())


def test_a_child_may_make_its_own_client(peer: Peer) -> None:
    code = (
        "import os, sys\nfrom offload_client import Client\n"
        "client = Client(sys.argv[1]); client.ping()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    with Client(sys.argv[1]) as own:\n"
        "        os._exit(own.generate('shapes', 'x').seed)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), client.ping() > 0)\n"
        "client.close()\n"
    )
    command = [sys.executable, "-c", code, peer.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "7 True\n"


def test_an_interrupt_cancels_the_job_and_goes_on_as_an_interrupt(
    start_peer: Callable[..., Peer],
) -> None:
    peer = start_peer(submit=hold)
    code = (
        "import sys\nfrom offload_client import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    try:\n"
        "        client.generate('shapes', 'x', on_progress=lambda p: print(p.state, flush=True))\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', client.ping() > 0)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, peer.endpoint], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=30)
    assert out == "interrupted True\n"
    assert peer.count("cancel") == 1


def test_an_interrupted_wait_loses_no_message(start_peer: Callable[..., Peer]) -> None:
    """A message swallowed by an interrupt comes again, since the client says hello once more."""
    jobs: list[tuple[Caller, str]] = []

    def first_loses(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request, "running"))
        jobs.append((caller, request.job))
        if len(jobs) > 1:
            caller.send(*finished(request.job))

    peer = start_peer(submit=first_loses)
    with Client(peer.endpoint) as client:
        job = client.submit("shapes", "x")
        main = threading.get_ident()
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            job.result()
        assert job.result(timeout_s=5).seed == 7
    assert peer.count("hello") == 2


def test_a_client_that_is_forgotten_open_leaks_nothing_silently(peer: Peer) -> None:
    code = (
        "import sys\nfrom offload_client import Client\nClient(sys.argv[1]).ping()\nprint('end')\n"
    )
    command = [sys.executable, "-W", "always", "-c", code, peer.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "end\n"
    assert "ResourceWarning" in done.stderr


def test_descriptors_are_given_back(twin: Twin, peer: Peer) -> None:
    def open_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def once() -> None:
        client = twin.kind(peer.endpoint)
        twin.do(client.ping())
        twin.do(client.close())

    for _ in range(3):
        once()
    time.sleep(0.4)
    before = open_descriptors()
    for _ in range(20):
        once()
    deadline = time.monotonic() + 5
    while open_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_descriptors() <= before
