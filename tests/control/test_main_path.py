"""Hello, submit, progress, result: the way of a request through the running control plane."""

from __future__ import annotations

from control.conftest import Serve

from offload_protocol.messages import Stats, Taken


async def test_a_job_is_accepted_run_and_its_result_delivered(serve: Serve) -> None:
    async with serve() as rig:
        client = await rig.client()
        accepted = await client.submit("a", seed=7)
        assert accepted["state"] in ("queued", "loading", "running")
        finished, frames = await client.end_of("a")
        assert finished.state == "done"
        assert finished.outcome is not None
        assert finished.outcome.seeds == [7]
        assert frames == []
        assert await client.ask(Taken, job="a") == {}
        stats = await client.ask(Stats)
        assert stats["jobs"]["completed_total"] == 1
        assert stats["jobs"]["results_kept"] == 0
