"""The channel between control plane and worker carries messages whole and shows a death."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

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
