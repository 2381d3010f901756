"""What the wire is measured against, each in a process of its own.

    python bench/wire_servers.py echo|starlette PLACE

`echo` is a bare ROUTER at the ipc endpoint PLACE; `starlette` serves HTTP on the unix socket
PLACE. Each answers a small request with a small answer and does
nothing in between. A message of `echo` that says `send N` is answered with N bytes.
"""

from __future__ import annotations

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
    {"echo": echo, "starlette": starlette}[sys.argv[1]](sys.argv[2])
