"""Daemons, workers and clients that end in the middle of something."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from system.daemons import Daemon, running_daemon

from offload_client import Client, Job
from offload_protocol.errors import OffloadError, WorkerCrashed

pytestmark = pytest.mark.system

PROMPT = "a yellow triangle on a blue background"
LONG = 900


def wait_for_step(job: Job, step: int, timeout_s: float = 90.0) -> None:
    """Wait until a job has come to that step."""
    deadline = time.monotonic() + timeout_s
    for event in job.events():
        assert time.monotonic() < deadline
        if event.state == "running" and event.step >= step:
            return
    raise AssertionError("the job ended before that step")


def wait_for_worker(client: Client, job: Job, other_than: int, timeout_s: float = 90.0) -> int:
    """Wait until a worker computes the job, and give its process id."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid: int | None = client.stats()["workers"][0]["pid"]
        (row,) = (row for row in client.jobs() if row.job == job.id)
        if pid not in (None, other_than) and row.state == "running" and row.step >= 2:
            return pid
        time.sleep(0.05)
    raise AssertionError("no worker computes the job")


def submit_long(client: Client) -> Job:
    return client.submit("shapes", prompt=PROMPT, seed=1, num_inference_steps=LONG)


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_job_ends_daemon_and_worker_cleanly(
    short_tmp: Path, number: signal.Signals
) -> None:
    with running_daemon(short_tmp / number.name) as daemon, daemon.client() as client:
        job = submit_long(client)
        wait_for_step(job, 2)
        worker = daemon.worker_pid()
        assert daemon.stop(number) == 0
        with pytest.raises(OffloadError):
            job.result(5)
        assert gone(worker)
        assert not (short_tmp / number.name / "offloadd.sock").exists()


def test_a_killed_daemon_takes_its_worker_with_it_and_can_be_started_again(
    short_tmp: Path,
) -> None:
    with running_daemon(short_tmp / "killed") as daemon:
        worker = daemon.worker_pid()
        daemon.stop(signal.SIGKILL)
        assert gone(worker)
    with running_daemon(short_tmp / "killed") as daemon, daemon.client() as client:
        assert client.generate("shapes", prompt=PROMPT, num_inference_steps=1).images


def test_a_worker_killed_from_outside_is_replaced_and_its_job_runs_again(short_tmp: Path) -> None:
    with running_daemon(short_tmp / "crash") as daemon, daemon.client() as client:
        steps = 20
        reference = client.generate("shapes", prompt=PROMPT, seed=2, num_inference_steps=steps)
        job = client.submit("shapes", prompt=PROMPT, seed=2, num_inference_steps=steps)
        wait_for_step(job, 2)
        waiting = client.submit("shapes", prompt=PROMPT, seed=2, num_inference_steps=1)
        # A SIGKILL that is not the kernel's own for want of memory is no strike against the job.
        os.kill(daemon.worker_pid(), signal.SIGKILL)
        assert job.result(90).image.tobytes() == reference.image.tobytes()
        assert waiting.result(90).images
        stats = client.stats()
        assert stats["workers"][0]["restarts_total"] == 1
        assert stats["jobs"]["requeued_total"] == 1


def test_a_job_that_crashes_two_workers_fails_with_the_cause(short_tmp: Path) -> None:
    with running_daemon(short_tmp / "twice") as daemon, daemon.client() as client:
        job, killed = submit_long(client), 0
        for _ in range(2):
            killed = wait_for_worker(client, job, other_than=killed)
            os.kill(killed, signal.SIGSEGV)
        with pytest.raises(WorkerCrashed, match="SIGSEGV"):
            job.result(30)
        assert client.generate("shapes", prompt=PROMPT, num_inference_steps=1).images


def test_a_cancelled_job_ends_within_a_step_and_the_next_picture_is_right(daemon: Daemon) -> None:
    with daemon.client() as client:
        reference = client.generate("shapes", prompt=PROMPT, seed=5, num_inference_steps=4)
        job = submit_long(client)
        wait_for_step(job, 2)
        started = time.monotonic()
        job.cancel()
        with pytest.raises(OffloadError) as caught:
            job.result(10)
        assert caught.value.code == "cancelled"
        assert time.monotonic() - started < 3
        again = client.generate("shapes", prompt=PROMPT, seed=5, num_inference_steps=4)
    assert reference.image.tobytes() == again.image.tobytes()


def test_the_daemon_answers_at_once_while_the_worker_computes(daemon: Daemon) -> None:
    with daemon.client() as client, daemon.client() as other:
        job = submit_long(client)
        wait_for_step(job, 1)
        waits_s = []
        for _ in range(20):
            started = time.monotonic()
            other.stats()
            waits_s.append(time.monotonic() - started)
        job.cancel()
    assert sorted(waits_s)[10] < 0.25


def test_many_threads_share_one_client(daemon: Daemon) -> None:
    with daemon.client() as client:
        sizes: list[tuple[int, int]] = []

        def draw(seed: int) -> None:
            result = client.generate("shapes", prompt=PROMPT, seed=seed, num_inference_steps=1)
            sizes.append(result.image.size)

        threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sizes == [(64, 64)] * 6
