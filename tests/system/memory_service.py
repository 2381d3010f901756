"""A service with the daemon's host memory and one worker's arena, and nothing else of the daemon.

Its first life makes weights, brings them into memory and deletes their file; every life says in
STATUS whether it has them, and how much it read from disk for that.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from offloadd.channel.framing import ChannelClosed, ControlEnd, WorkerEnd
from offloadd.control.inheritance import Inheritance
from offloadd.control.memory import HostMemory
from offloadd.control.notify import Notifier, StoredDescriptors
from offloadd.store.arena.client import ArenaClient
from offloadd.store.index import CheckpointIndex, read_checkpoint
from offloadd.store.layout import lay_out
from offloadd.store.reader import DiskReader

WEIGHTS = Path("/run/weights.safetensors")
STATUS = Path("/run/memory_service.json")
PIECE_BYTES = 1 << 20


def make_weights() -> CheckpointIndex:
    random = np.random.default_rng(0)
    save_file({f"w{at}": random.random((300, 1000)) for at in range(3)}, WEIGHTS)
    return read_checkpoint(WEIGHTS)


def use_weights(arena: ArenaClient, reader: DiskReader, is_first: bool) -> dict[str, Any]:
    index = make_weights() if is_first else arena.recall(WEIGHTS)
    if index is None:
        return {"digest": None, "read_bytes": 0}
    layout = lay_out([("", [place.spec for place in index.tensors.values()])])
    source = arena.open(index, layout, owner="m/unet")
    WEIGHTS.unlink(missing_ok=True)
    view = source.host_view()
    assert view is not None
    return {"digest": hashlib.sha256(view).hexdigest(), "read_bytes": reader.read_bytes_total}


async def serve() -> None:
    notifier = Notifier(os.environ)
    ours, theirs = socket.socketpair()
    end = ControlEnd(ours)
    memory = HostMemory(
        lambda _, message, descriptors: end.send(message, (), descriptors),
        lambda held_bytes: 1 << 30,
        frozenset,
        time.monotonic,
        Inheritance(StoredDescriptors(os.environ, notifier)),
    )
    worker, reader = WorkerEnd(theirs), DiskReader(threads=1, chunk_bytes=1 << 20)
    arena = ArenaClient(reader, worker.send, piece_bytes=PIECE_BYTES)

    def receive() -> None:
        try:
            while True:
                message, _, descriptors = worker.receive_all()
                arena.handle(message, descriptors)  # type: ignore[arg-type]
        except ChannelClosed:
            return

    threading.Thread(target=receive, daemon=True).start()
    is_first = not STATUS.exists()
    listening = asyncio.create_task(end.listen(lambda news, _: memory.on_news(news)))  # type: ignore[arg-type]
    facts = await asyncio.to_thread(use_weights, arena, reader, is_first)
    while any(one.filler is not None for one in memory.catalogue.segments.values()):
        await asyncio.sleep(0.01)
    STATUS.write_text(json.dumps({"pid": os.getpid(), **facts}))
    notifier.ready("has looked")
    await listening


if __name__ == "__main__":
    asyncio.run(serve())
