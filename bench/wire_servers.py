"""What the wire is measured against, each in a process of its own.

    python bench/wire_servers.py echo|floor|starlette PLACE

`echo` is a bare ROUTER at the ipc endpoint PLACE; `starlette` serves HTTP on the unix socket
PLACE. Each answers a small request with a small answer and does
nothing in between. A message of `echo` that says `send N` is answered with N bytes.

`floor` is an echo whose messages pass through one more process and are written down once on their
way, in a journal such as the daemon's: what is left of a job's way where nobody looks at it.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import sys
from typing import Any


def echo(place: str) -> None:
    import zmq

    router: Any = zmq.Context().socket(zmq.ROUTER)
    router.bind(place)
    made: dict[bytes, bytes] = {}
    while True:
        identity, body = router.recv_multipart()
        if not body.startswith(b"send "):
            router.send_multipart([identity, body])
            continue
        if body not in made:
            made = {body: bytes(int(body.removeprefix(b"send ")))}
        router.send_multipart([identity, b"sent", made[body]], copy=False)


def floor(place: str) -> None:
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        while body := theirs.recv(1 << 16):
            theirs.sendall(body)
        return
    theirs.close()

    import zmq

    journal = sqlite3.connect(f"{place.removeprefix('ipc://')}.db", isolation_level=None)
    for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
        journal.execute(f"PRAGMA {setting}")
    journal.execute("CREATE TABLE jobs (number INTEGER PRIMARY KEY, body BLOB)")
    router: Any = zmq.Context().socket(zmq.ROUTER)
    router.bind(place)
    while True:
        identity, body = router.recv_multipart()
        ours.sendall(body)
        answer = ours.recv(1 << 16)
        journal.execute("INSERT INTO jobs (body) VALUES (?)", (answer,))
        router.send_multipart([identity, answer])


def starlette(place: str) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def handle(request: Request) -> JSONResponse:
        await request.json()
        return JSONResponse({"outputs": {}})

    app = Starlette(routes=[Route("/generate", handle, methods=["POST"])])
    uvicorn.run(app, uds=place, log_level="error", access_log=False, timeout_keep_alive=600)


if __name__ == "__main__":
    {"echo": echo, "floor": floor, "starlette": starlette}[sys.argv[1]](sys.argv[2])
