"""A worker owns its device or says why not, ends with its channel, and outlives its faults."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hosting.hosting_help import CALL, SEED, Drawn
from worker.conftest import register
from worker.worker_process import WorkerProcess, worker_process

from offloadd.channel.messages import DeviceReport, JobProgressed, ModelLoaded, RunJob
from offloadd.worker.exits import CHANNEL_CLOSED, DEVICE_FAULT, NO_DEVICE

ENDS_WITHIN_S = 2.0
FAULTY = str(Path(__file__).with_name("faulty_worker.py"))

no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator is here")


def ends_within(worker: WorkerProcess, seconds: float = ENDS_WITHIN_S) -> int:
    return worker.process.wait(timeout=seconds)


@no_gpu_here
def test_auto_is_the_cpu_where_there_is_no_accelerator() -> None:
    with worker_process(device="auto") as worker:
        (report,) = worker.news
    assert isinstance(report, DeviceReport)
    assert report.device == "cpu"
    assert 0 < report.free_bytes <= report.total_bytes


@no_gpu_here
def test_case_56_a_device_that_is_not_there_is_never_replaced() -> None:
    with worker_process(device="cuda:0", ready=False) as worker:
        assert ends_within(worker, 120) == NO_DEVICE
        assert "cuda:0" in worker.log()


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:1"])
def test_a_device_that_is_no_device_is_wrong_usage(device: str) -> None:
    with worker_process(device=device, ready=False) as worker:
        assert ends_within(worker, 10) == 2
        assert device in worker.log()


def test_it_ends_at_once_when_the_channel_closes() -> None:
    with worker_process() as worker:
        worker.channel.close()
        assert ends_within(worker) == CHANNEL_CLOSED


def test_it_ends_while_it_still_imports() -> None:
    with worker_process(ready=False) as worker:
        time.sleep(0.5)
        worker.channel.close()
        assert ends_within(worker, 5) == CHANNEL_CLOSED


def test_it_ends_in_the_middle_of_a_job(sd_directory: Path) -> None:
    with worker_process() as worker:
        register(worker, "tiny", sd_directory)
        arguments = {**CALL, "num_inference_steps": 900}
        worker.send(RunJob(job="long", model="tiny", arguments=arguments, seed=1))
        worker.expect(JobProgressed, state="running")
        worker.channel.shutdown(socket.SHUT_RDWR)
        assert ends_within(worker) == CHANNEL_CLOSED


def test_it_leaves_ctrl_c_to_the_control_plane() -> None:
    with worker_process() as worker:
        worker.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert worker.process.poll() is None


def test_it_dies_with_its_parent_even_if_the_channel_stays_open() -> None:
    ours, theirs = socket.socketpair()
    starter = (
        "import subprocess, sys;"
        "subprocess.Popen([sys.executable, '-m', 'offloadd.worker', '--device', 'cpu',"
        " '--channel-fd', sys.argv[1]], pass_fds=[int(sys.argv[1])]).wait()"
    )
    with ours:
        ours.settimeout(120)
        with theirs:
            command = [sys.executable, "-c", starter, str(theirs.fileno())]
            parent = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        assert ours.recv(1)
        parent.kill()
        parent.communicate(timeout=10)
        ours.settimeout(5)
        while ours.recv(65536):
            pass


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAULT_FILE", str(tmp_path / "fault"))
    return tmp_path / "fault"


@pytest.fixture
def faulty(fault: Path, sd_directory: Path) -> Iterator[WorkerProcess]:
    with worker_process(command=[FAULTY]) as worker:
        register(worker, "tiny", sd_directory, offload="group")
        yield worker


def test_case_28_a_fault_fails_its_job_and_the_next_pictures_are_right(
    faulty: WorkerProcess, fault: Path, reference: Drawn
) -> None:
    codes = {
        "out_of_memory 2": "out_of_memory",
        "memory 2": "out_of_memory",
        "bug": "internal",
        "disk": "storage_failed",
    }
    for kind, code in codes.items():
        fault.write_text(kind)
        ended = faulty.run(f"{kind} job", "tiny", SEED, **CALL)
        assert ended.error is not None
        assert ended.error.code == code
        again = faulty.run(f"after {kind}", "tiny", SEED, **CALL)
        assert again.outcome is not None
        np.testing.assert_array_equal(again.outcome.outputs["images"], reference)
    assert "KeyError" in faulty.log()
    loads = [one for one in faulty.news if isinstance(one, ModelLoaded)]
    # Only what rests on disk may be damaged by a disk's fault, so that model is loaded anew.
    assert len(loads) == 2


def test_case_28_a_job_that_runs_out_of_memory_once_is_tried_once_more_from_its_start(
    faulty: WorkerProcess, fault: Path, reference: Drawn
) -> None:
    fault.write_text("out_of_memory")
    ended = faulty.run("once", "tiny", SEED, **CALL)
    assert ended.outcome is not None, ended.error
    np.testing.assert_array_equal(ended.outcome.outputs["images"], reference)
    assert "trying once more with a smaller plan" in faulty.log()


def test_case_27_a_fault_that_poisons_the_device_ends_the_process_and_says_so(
    faulty: WorkerProcess, fault: Path
) -> None:
    fault.write_text("sticky")
    with pytest.raises(EOFError):
        faulty.run("poisoned", "tiny", **CALL)
    assert ends_within(faulty) == DEVICE_FAULT
    assert "the device failed" in faulty.log()
