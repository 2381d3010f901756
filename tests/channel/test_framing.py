"""The channel between control plane and worker carries messages whole and shows a death."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloadd.channel.framing import ChannelClosed, ControlEnd, WorkerEnd
from offloadd.channel.messages import CancelJob, JobEnded, RunJob


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


async def test_messages_and_frames_arrive_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    control, worker = await ControlEnd.open(pair[0]), WorkerEnd(pair[1])
    run = RunJob(job="a", model="m", arguments={"prompt": "x"}, seed=3)
    control.send(run, [b"", b"\x00" * 1000])
    assert worker.receive() == (run, [bytearray(), bytearray(1000)])
    worker.send(JobEnded(job="a"), [memoryview(b"picture")])
    assert await control.receive() == (JobEnded(job="a"), [b"picture"])
    control.close()


async def test_the_worker_sees_the_control_plane_close(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, worker = await ControlEnd.open(pair[0]), WorkerEnd(pair[1])
    control.send(CancelJob(job="a"))
    control.close()
    # The loop has to run for the close to reach the socket, so the worker waits in a thread.
    assert (await asyncio.to_thread(worker.receive))[0] == CancelJob(job="a")
    with pytest.raises(ChannelClosed):
        await asyncio.to_thread(worker.receive)


async def test_the_control_plane_sees_a_worker_die_in_the_middle_of_a_message(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control = await ControlEnd.open(pair[0])
    pair[1].sendall(b"\x02\x00\x00\x00\xff")
    pair[1].close()
    with pytest.raises(ChannelClosed):
        await control.receive()
    control.close()


def memfd(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def content(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


async def test_descriptors_arrive_with_their_own_message(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, worker = await ControlEnd.open(pair[0]), WorkerEnd(pair[1])
    files = [memfd(b"first"), memfd(b"second"), memfd(b"third")]
    control.send(CancelJob(job="a"), (), files[:2])
    control.send(CancelJob(job="b"), [b"frame"])
    control.send(CancelJob(job="c"), [b"frame"], files[2:])
    for file in files:
        os.close(file)
    received = [worker.receive_all() for _ in range(3)]
    assert [message for message, _, _ in received] == [CancelJob(job=job) for job in "abc"]
    assert [[content(one) for one in descriptors] for _, _, descriptors in received] == [
        [b"first", b"second"],
        [],
        [b"third"],
    ]
    control.close()


async def test_descriptors_keep_their_place_when_the_worker_reads_slowly(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, worker = await ControlEnd.open(pair[0]), WorkerEnd(pair[1])
    before = len(list(Path("/proc/self/fd").iterdir()))
    # More than a socket buffers, so that most of it waits in the control plane.
    big = bytes(3_000_000)
    for number in range(4):
        file = memfd(str(number).encode())
        control.send(CancelJob(job=str(number)), [big], [file])
        os.close(file)

    def read_all() -> list[tuple[str, int, list[bytes]]]:
        found = []
        for _ in range(4):
            message, frames, descriptors = worker.receive_all()
            assert isinstance(message, CancelJob)
            found.append((message.job, len(frames[0]), [content(one) for one in descriptors]))
        return found

    assert await asyncio.to_thread(read_all) == [
        (str(number), len(big), [str(number).encode()]) for number in range(4)
    ]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    control.close()


async def test_closing_forgets_what_a_worker_did_not_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    control = await ControlEnd.open(pair[0])
    file = memfd(b"x")
    control.send(CancelJob(job="a"), [bytes(3_000_000)], [file])
    control.send(CancelJob(job="b"), [bytes(3_000_000)], [file])
    os.close(file)
    control.close()
    control.send(CancelJob(job="c"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    pair[1].close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 2
