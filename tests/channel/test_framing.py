"""The channel between control plane and worker carries messages whole and shows a death."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_protocol.codec import UNREADABLE
from offloadd.channel.framing import ChannelClosed, ControlEnd, WorkerEnd
from offloadd.channel.incoming import CHUNK_BYTES, HEAD, LENGTH, TURN_BYTES, Incoming
from offloadd.channel.messages import CancelJob, JobEnded, RunJob, WorkerNews


async def news_of(control: ControlEnd, most: int) -> list[tuple[WorkerNews, list[bytearray]]]:
    """What comes until the channel ends, or `most` messages have come."""
    news: list[tuple[WorkerNews, list[bytearray]]] = []

    def take(one: WorkerNews, frames: list[bytearray]) -> None:
        news.append((one, frames))
        if len(news) == most:
            enough.set()

    enough = asyncio.Event()
    listening = asyncio.create_task(control.listen(take))
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait((listening, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if listening.done():
        listening.result()
    else:
        listening.cancel()
    return news


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


async def test_messages_and_frames_arrive_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    control, worker = ControlEnd(pair[0]), WorkerEnd(pair[1])
    run = RunJob(job="a", model="m", arguments={"prompt": "x"}, seed=3)
    control.send(run, [b"", b"\x00" * 1000])
    assert worker.receive() == (run, [bytearray(), bytearray(1000)])
    worker.send(JobEnded(job="a"), [memoryview(b"picture")])
    assert await news_of(control, 1) == [(JobEnded(job="a"), [bytearray(b"picture")])]
    control.close()


async def test_the_worker_sees_the_control_plane_close(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, worker = ControlEnd(pair[0]), WorkerEnd(pair[1])
    control.send(CancelJob(job="a"))
    control.close()
    # The loop has to run for the close to reach the socket, so the worker waits in a thread.
    assert (await asyncio.to_thread(worker.receive))[0] == CancelJob(job="a")
    with pytest.raises(ChannelClosed):
        await asyncio.to_thread(worker.receive)


async def test_the_control_plane_sees_a_worker_die_in_the_middle_of_a_message(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control = ControlEnd(pair[0])
    pair[1].sendall(b"\x02\x00\x00\x00\xff")
    pair[1].close()
    assert await news_of(control, 1) == []
    control.close()


async def test_closing_our_own_end_ends_listening(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control = ControlEnd(pair[0])
    asyncio.get_running_loop().call_later(0.01, control.close)
    assert await news_of(control, 1) == []


async def test_what_a_worker_said_before_its_end_is_heard(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, worker = ControlEnd(pair[0]), WorkerEnd(pair[1])
    worker.send(JobEnded(job="a"))
    worker.close()
    control.send(CancelJob(job="a"))
    assert await news_of(control, 2) == [(JobEnded(job="a"), [])]
    control.close()


async def test_what_the_taker_raises_comes_out_of_listening(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, worker = ControlEnd(pair[0]), WorkerEnd(pair[1])
    worker.send(JobEnded(job="a"))

    def take(news: WorkerNews, frames: list[bytearray]) -> None:
        raise LookupError(type(news).__name__)

    with pytest.raises(LookupError, match="JobEnded"):
        await control.listen(take)
    control.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x01\0\0\0\x01\0\0\0\0\0\0\0\xc1",
        b"\0" * 12,
        b"\xff" * 12,
        b"\x01\0\0\0" + b"\xff" * 8,
    ],
    ids=["no message", "no parts", "too many parts", "too long"],
)
async def test_what_cannot_be_a_message_is_said_so(
    pair: tuple[socket.socket, socket.socket], nonsense: bytes
) -> None:
    control = ControlEnd(pair[0])
    pair[1].sendall(nonsense)
    with pytest.raises(UNREADABLE):
        await news_of(control, 1)
    control.close()


async def test_a_large_frame_lets_the_loop_do_its_other_work(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, worker = ControlEnd(pair[0]), WorkerEnd(pair[1])
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    size_bytes = 16 << 20
    sending = asyncio.create_task(
        asyncio.to_thread(worker.send, JobEnded(job="a"), [bytes(size_bytes), b"end"])
    )
    ((_, frames),) = await news_of(control, 1)
    await sending
    counting.cancel()
    assert [len(frame) for frame in frames] == [size_bytes, 3]
    assert turns >= size_bytes // TURN_BYTES
    control.close()


@given(
    messages=st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=4), max_size=6),
    large=st.booleans(),
    data=st.data(),
)
def test_messages_are_parted_the_same_however_they_arrive(
    messages: list[list[bytes]], large: bool, data: st.DataObject
) -> None:
    if large:
        messages = [*messages, [b"x" * (CHUNK_BYTES + 5), b""], [b"last"]]
    stream = b"".join(
        HEAD.pack(len(parts), len(parts[0]))
        + b"".join(LENGTH.pack(len(part)) for part in parts[1:])
        + b"".join(parts)
        for parts in messages
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    incoming, found = Incoming(), []
    with ours, theirs:
        while stream:
            size_bytes = data.draw(st.integers(1, max(len(stream), 1)))
            theirs.sendall(stream[:size_bytes])
            stream = stream[size_bytes:]
            assert incoming.read(ours)
            found += list(incoming.messages())
    assert found == messages


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
    control, worker = ControlEnd(pair[0]), WorkerEnd(pair[1])
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
    control, worker = ControlEnd(pair[0]), WorkerEnd(pair[1])
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
    control = ControlEnd(pair[0])
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
