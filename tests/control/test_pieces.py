"""Large results flow in pieces: whole at the end, and in nobody's way."""

from __future__ import annotations

import asyncio

import pytest
from control.conftest import Serve

from offload_client import AsyncClient, Client
from offload_protocol.errors import InvalidRequest, UnknownJob
from offload_protocol.messages import Cancel, Fetch, Read, Taken

SIZE_BYTES = 30_000_001


async def test_both_clients_get_a_large_result_whole_while_others_are_answered(
    serve: Serve,
) -> None:
    async with serve() as rig, AsyncClient(rig.endpoint) as other:

        def fetch() -> int:
            with Client(rig.endpoint) as client:
                return len(client.generate("good", f"big {SIZE_BYTES}").outputs["big"])

        async with AsyncClient(rig.endpoint) as client:
            fetching = asyncio.gather(
                asyncio.to_thread(fetch), client.generate("good", f"big {SIZE_BYTES}")
            )
            pings = 0
            while not fetching.done():
                assert await other.ping() < 5
                pings += 1
            size_bytes, result = await fetching
        assert pings > 10
        assert size_bytes == SIZE_BYTES
        assert len(result.outputs["big"]) == SIZE_BYTES


async def test_pieces_are_read_from_any_connection_until_the_result_is_taken(serve: Serve) -> None:
    async with serve() as rig:
        first, second = await rig.client(), await rig.client()
        await first.submit("a", "big 3000000")
        finished, frames = await first.end_of("a")
        assert finished.sizes == [3_000_000]
        assert frames == []
        limit = (await second.hello())["limits"]["max_piece_bytes"]
        assert len(await second.piece("a", 0, 0)) == limit
        assert len(await second.piece("a", 0, 2 * limit)) == 3_000_000 - 2 * limit
        with pytest.raises(InvalidRequest, match="no byte 0 of a frame 1"):
            await second.ask(Read, job="a", frame=1)
        with pytest.raises(UnknownJob):
            await second.ask(Read, job="b", frame=0)
        await first.ask(Taken, job="a")
        with pytest.raises(UnknownJob, match="was taken"):
            await second.ask(Read, job="a", frame=0)


async def test_reading_of_a_job_without_a_result_says_what_it_is_waiting_for(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        await client.submit("a", "hang")
        with pytest.raises(InvalidRequest, match="no result yet") as caught:
            await client.ask(Read, job="a", frame=0)
        assert "finished" in caught.value.hint
        await client.ask(Cancel, job="a")
        finished, _ = await client.end_of("a")
        assert finished.error is not None
        assert "new id" in finished.error.hint
        with pytest.raises(InvalidRequest, match="no frames"):
            await client.ask(Read, job="a", frame=0)
        await client.ask(Taken, job="a")
        with pytest.raises(UnknownJob, match="was taken") as taken:
            await client.ask(Fetch, job="a")
        assert taken.value.hint
