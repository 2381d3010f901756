"""Whatever arrives, it is answered or counted, and others are served as before."""

from __future__ import annotations

import asyncio
import random
import socket

import msgspec
import pytest
from control.conftest import Serve, until

from offload_protocol import codec
from offload_protocol.errors import (
    InternalError,
    InvalidRequest,
    OffloadError,
    ProtocolMismatch,
    TooLarge,
)
from offload_protocol.limits import DEFAULT_LIMITS
from offload_protocol.messages import Error, Ping, Stats, Submit
from offloadd.control.clients.handlers import Handlers

PING = codec.encode(Ping(rid=5))
NESTED = b"\x91" * 2000 + b"\xc0"

UNREADABLE = {
    "empty": b"",
    "never used byte": b"\xc1",
    "two objects": PING + PING,
    "nested": NESTED,
    "nested in a field": b"\x83\xa2op\xa4ping\xa3rid\x05\xa1x" + NESTED,
    "claimed array": b"\xdd\xff\xff\xff\xff",
    "claimed map": b"\xdf\xff\xff\xff\xff",
    "claimed text": b"\xdb\xff\xff\xff\xff",
    "bad utf-8": b"\x82\xa2op\xa4\xff\xfe\xfd\xfc\xa3rid\x05",
    "integer keys": b"\x82\x01\x02\x03\x04",
    "a list": msgspec.msgpack.encode(["ping", 5]),
    "text": msgspec.msgpack.encode("ping"),
    "no number": msgspec.msgpack.encode({"op": "ping"}),
    "number as text": msgspec.msgpack.encode({"op": "ping", "rid": "5"}),
    "no operation": msgspec.msgpack.encode({"rid": 5}),
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00",
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_case_36_unreadable_messages_are_refused_and_counted(
    serve: Serve, body: bytes
) -> None:
    async with serve(models=()) as rig:
        for client in (await rig.client(), rig.stranger()):
            await client.socket.send(body)
            answer = await client.answer(None)
            assert isinstance(answer, Error)
            assert answer.error.code == "invalid_request"
        good = await rig.client()
        assert (await good.ask(Stats))["daemon"]["protocol_errors_total"] == 2


async def test_case_36_a_readable_number_is_repeated_in_the_refusal(serve: Serve) -> None:
    async with serve(models=()) as rig:
        client = await rig.client()
        await client.socket.send(msgspec.msgpack.encode({"op": "submit", "rid": 77, "job": 3}))
        answer = await client.answer(77)
        assert isinstance(answer, Error)
        assert "submit request is not well formed" in answer.error.message
        await client.socket.send(msgspec.msgpack.encode({"op": "explode", "rid": 78}))
        answer = await client.answer(78)
        assert isinstance(answer, Error)
        assert "unknown operation 'explode'" in answer.error.message


async def test_case_36_frames_that_do_not_fit_are_refused(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        with pytest.raises(TooLarge, match="257 frames, the limit is 256"):
            await client.ask(Ping, [b""] * 257)
        with pytest.raises(TooLarge, match="257 frames, the limit is 256"):
            await client.ask(Ping, [b""] * 5000)
        image = {"$image": 0, "mode": "RGB", "size": [2, 2]}
        for frames in ([], [b"short"], [b"x" * 13]):
            with pytest.raises(InvalidRequest):
                await client.ask(
                    Submit, frames, job="a", model="good", arguments={"prompt": "", "image": image}
                )
        assert await client.ask(Ping, [b"unused"]) == {}


async def test_case_36_a_body_over_the_limit_is_refused(serve: Serve) -> None:
    async with serve(models=()) as rig:
        client = await rig.client()
        await client.socket.send(b"\xc0" * (DEFAULT_LIMITS.max_body_bytes + 1))
        answer = await client.answer(None)
        assert isinstance(answer, Error)
        assert answer.error.code == "too_large"


async def test_case_36_bytes_that_are_no_zeromq_only_close_their_connection(serve: Serve) -> None:
    async with serve(models=()) as rig:
        client = await rig.client()
        path = rig.endpoint.removeprefix("ipc://")
        noise = random.Random(36)
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(path)
                raw.sendall(noise.randbytes(100))
        assert await client.ask(Ping) == {}


async def test_case_36_random_bodies_never_end_the_loop(serve: Serve) -> None:
    async with serve(models=()) as rig:
        client = await rig.client()
        noise = random.Random(36)
        valid = codec.encode(Submit(rid=1, job="a", model="m", arguments={"prompt": "x"}))
        for _ in range(300):
            body = bytearray(valid)
            for _ in range(noise.randrange(1, 6)):
                body[noise.randrange(len(body))] = noise.randrange(256)
            await client.socket.send(bytes(body))
        good = await rig.client()
        assert await good.ask(Ping) == {}


@pytest.mark.parametrize("version", [0, 2, 99])
async def test_case_38_another_version_is_refused_naming_both(serve: Serve, version: int) -> None:
    async with serve(models=()) as rig:
        client = rig.stranger()
        with pytest.raises(
            ProtocolMismatch, match=f"version {version} .*daemon version 1"
        ) as caught:
            await client.hello(version=version)
        assert caught.value.details == {"client": version, "daemon": 1}


@pytest.mark.parametrize("version", [None, "1", 1.5])
async def test_case_38_a_missing_or_wrong_version_is_refused(serve: Serve, version: object) -> None:
    async with serve(models=()) as rig:
        client = rig.stranger()
        hello = {"op": "hello", "rid": 1, "session": "x", "version": version}
        await client.socket.send(msgspec.msgpack.encode(hello))
        answer = await client.answer(1)
        assert isinstance(answer, Error)
        assert answer.error.code == "invalid_request"


async def test_case_38_unknown_fields_are_ignored(serve: Serve) -> None:
    async with serve(models=()) as rig:
        client = rig.stranger()
        hello = {"op": "hello", "rid": 1, "session": "x", "version": 1, "colour": "blue"}
        await client.socket.send(msgspec.msgpack.encode(hello))
        assert not isinstance(await client.answer(1), Error)


async def test_the_first_message_has_to_be_a_hello(serve: Serve) -> None:
    async with serve(models=()) as rig:
        client = rig.stranger()
        with pytest.raises(ProtocolMismatch) as caught:
            await client.ask(Stats)
        assert caught.value.details == {"hello_required": True}
        await client.hello()
        await client.ask(Stats)


@pytest.mark.parametrize("session", ["", "x" * 101, "a\nb"])
async def test_a_session_has_to_be_fit_for_a_log(serve: Serve, session: str) -> None:
    async with serve(models=()) as rig:
        with pytest.raises(OffloadError, match="session"):
            await rig.stranger().hello(session=session)


async def test_what_a_client_calls_itself_commands_nobodys_terminal(serve: Serve) -> None:
    async with serve(models=()) as rig:
        client = rig.stranger()
        await client.hello(program="\x1b[31mred", client_version="\x1b]0;t\x07" + "1" * 200)
        (listed,) = (await client.ask(Stats))["clients"]
        assert listed["program"] == "[31mred"
        assert listed["version"] == "]0;t" + "1" * 94


async def test_a_client_that_left_is_no_longer_listed(serve: Serve) -> None:
    async with serve(models=()) as rig:
        stays, leaves = await rig.client(), await rig.client()
        assert len((await stays.ask(Stats))["clients"]) == 2
        leaves.socket.close(linger=0)

        async def is_alone() -> bool:
            return len((await stays.ask(Stats))["clients"]) == 1

        await until(is_alone)
        for _ in range(20):
            (await rig.client()).socket.close(linger=0)
        await until(is_alone)


async def test_case_34_a_client_that_never_reads_costs_others_nothing(serve: Serve) -> None:
    async with serve() as rig:
        deaf, good = await rig.client(), await rig.client()
        for number in range(60):
            await deaf.submit(f"big{number}", "big 1000000")
        # From here on it only asks. Its socket's own buffers fill, and then the daemon's outbox.
        for number in range(5000):
            await deaf.say(Stats(rid=1_000_000 + number))
        await good.submit("a")
        finished, _ = await good.end_of("a")
        assert finished.state == "done"

        async def has_run_all() -> bool:
            return bool((await good.ask(Stats))["jobs"]["completed_total"] == 61)

        await until(has_run_all, 30)
        stats = await good.ask(Stats)
        waiting = {one["waiting_bytes"] for one in stats["clients"]}
        assert 0 < max(waiting) < 8 << 20
        for number in range(60):
            finished, frames = await asyncio.wait_for(deaf.end_of(f"big{number}"), 30)
            assert finished.state == "done"
            assert len(frames[0]) == 1_000_000


async def test_a_result_that_fits_no_message_is_answered_all_the_same(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its client waits for ever, now and after each reconnection."""
    async with serve(models=()) as rig:
        client = await rig.client()
        later = asyncio.get_running_loop().create_future()
        failed = asyncio.get_running_loop().create_future()
        answers = iter([{"bytes": 1 << 70}, later, failed])
        with monkeypatch.context() as patch:
            patch.setattr(Handlers, "handle", lambda *_: next(answers))
            later.set_result({"path": "\udcff"})
            failed.set_exception(RuntimeError("a fault"))
            for _ in range(3):
                with pytest.raises(InternalError, match="see its log"):
                    await client.ask(Ping)
        await client.ask(Ping)
