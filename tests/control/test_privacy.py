"""A user sees own jobs only, administrators all; what concerns others needs the role.

Clients of other users are real processes under another uid, which only root can start.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control.conftest import Serve, until

from offload_protocol.messages import Cancel, Jobs, Stats
from offloadd.control.clients.peers import LocalPeer
from offloadd.control.clients.roles import Roles

OTHER_UID = 65534

CLIENT = """
import json, os, sys
import zmq
from offload_protocol import codec, messages
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
socket = zmq.Context().socket(zmq.DEALER)
socket.linger = 0
socket.connect(sys.argv[1])
for rid, line in enumerate(sys.stdin, 1):
    op, fields = json.loads(line)
    socket.send(codec.encode(messages.REQUESTS[op](rid=rid, **fields)))
    while True:
        if not socket.poll(3000):
            sys.exit("no answer")
        answer = codec.decode_answer(socket.recv_multipart()[0])
        if getattr(answer, "rid", None) == rid:
            break
    print(json.dumps(codec.plain(answer)), flush=True)
"""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to act as another user")


async def as_other_user(endpoint: str, *requests: tuple[str, dict[str, Any]]) -> list[Any]:
    """The answers that another user's client gets; the first request is made for it: hello."""
    hello = ("hello", {"version": 1, "session": "session-1", "program": "other"})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, endpoint, str(OTHER_UID)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    lines = "".join(json.dumps(request) + "\n" for request in (hello, *requests))
    out, _ = await asyncio.wait_for(process.communicate(lines.encode()), 20)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()[1:]]


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An endpoint that other users can reach, if the socket's mode lets them."""
    with tempfile.TemporaryDirectory(prefix="offloadd-") as directory:
        Path(directory).chmod(0o755)
        yield f"ipc://{directory}/offloadd.sock"


def open_socket(endpoint: str) -> None:
    Path(endpoint.removeprefix("ipc://")).chmod(0o666)


async def test_another_users_jobs_and_programs_are_not_shown(serve: Serve) -> None:
    async with serve() as rig:
        open_socket(rig.endpoint)
        client = await rig.client("session-1")
        await client.submit("secret", "hang")
        await client.read_until_running("secret")
        await client.submit("waits")
        jobs, stats, models = await as_other_user(
            rig.endpoint, ("jobs", {}), ("stats", {}), ("models", {})
        )
        assert jobs["result"] == {"jobs": []}
        assert [one["program"] for one in stats["result"]["clients"]] == ["other"]
        assert stats["result"]["queue"]["depth"] == 1
        assert len(models["result"]["models"]) == 5


async def test_case_32_another_users_jobs_cannot_be_touched(serve: Serve) -> None:
    async with serve() as rig:
        open_socket(rig.endpoint)
        client = await rig.client("session-1")
        await client.submit("secret", "hang")
        await client.read_until_running("secret")
        answers = await as_other_user(
            rig.endpoint,
            *((op, {"job": "secret"}) for op in ("cancel", "fetch", "taken")),
            ("submit", {"job": "secret", "model": "good", "arguments": {"prompt": "echo"}}),
        )
        assert [one.get("error", {}).get("code") for one in answers[:3]] == ["unknown_job"] * 3
        # The same id of another user is another job.
        assert answers[3]["result"]["mine"]
        states = {
            (row["job"], row["mine"]): row["state"] for row in (await client.ask(Jobs))["jobs"]
        }
        # It may be the other's turn, as the other is another user.
        assert states["secret", True] in ("running", "parked")
        assert states["secret", False] in ("queued", "running", "done")


async def test_administrators_see_and_cancel_the_jobs_of_others(serve: Serve) -> None:
    async with serve() as rig:
        open_socket(rig.endpoint)
        request = {"job": "theirs", "model": "good", "arguments": {"prompt": "hang"}}
        await as_other_user(rig.endpoint, ("submit", request))
        client = await rig.client()
        rows = (await client.ask(Jobs))["jobs"]
        assert [(row["job"], row["mine"]) for row in rows] == [("theirs", False)]
        await client.ask(Cancel, job="theirs")

        async def is_cancelled() -> bool:
            stats = await client.ask(Stats)
            return bool(stats["jobs"]["cancelled_total"])

        await until(is_cancelled)


async def test_only_administrators_load_from_a_path(serve: Serve) -> None:
    async with serve() as rig:
        open_socket(rig.endpoint)
        refused, loaded = await as_other_user(
            rig.endpoint,
            ("load", {"name": "mine", "source": "/good"}),
            ("load", {"name": "good"}),
        )
        assert refused["error"]["code"] == "unauthorized"
        assert f"uid {OTHER_UID}" in refused["error"]["message"]
        assert loaded["result"]["state"] == "ready"


async def test_case_58_a_closed_socket_refuses_other_users(serve: Serve) -> None:
    async with serve() as rig:
        code = (
            "import os, socket, sys\n"
            f"os.setgid({OTHER_UID}); os.setuid({OTHER_UID})\n"
            "socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, rig.endpoint.removeprefix("ipc://")),
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await process.communicate()
        assert b"PermissionError" in err


async def test_the_administrators_group_counts(serve: Serve) -> None:
    roles = Roles(frozenset({0}), group_id=5)
    assert roles.administrates(LocalPeer(uid=9, gid=5, pid=1))
    assert not roles.administrates(LocalPeer(uid=9, gid=6, pid=1))
