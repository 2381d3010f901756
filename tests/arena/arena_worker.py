"""A worker process with an arena and nothing else: does what lines of JSON on its stdin say."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from store.checkpoints import layout_of

from offloadd.channel.framing import ChannelClosed, WorkerEnd
from offloadd.store.arena.client import ArenaClient
from offloadd.store.arena.source import ArenaSource
from offloadd.store.index import read_checkpoint
from offloadd.store.reader import DiskReader


def receive(end: WorkerEnd, arena: ArenaClient) -> None:
    try:
        while True:
            message, _, descriptors = end.receive_all()
            arena.handle(message, descriptors)  # type: ignore[arg-type]
    except ChannelClosed:
        os._exit(0)


def main() -> None:
    end = WorkerEnd(socket.socket(fileno=int(sys.argv[1])))
    reader = DiskReader(threads=1, chunk_bytes=1 << 20)
    arena = ArenaClient(reader, end.send, piece_bytes=int(sys.argv[2]))
    threading.Thread(target=receive, args=(end, arena), daemon=True).start()
    sources: dict[str, ArenaSource] = {}

    def never_stop(done: int, total: int) -> None:
        return

    def stop_in_the_middle(done: int, total: int) -> None:
        if done > total // 2:
            print(json.dumps(done), flush=True)
            threading.Event().wait()

    def do(order: dict[str, Any]) -> Any:
        match order["do"]:
            case "open" | "recall" | "hang":
                path = Path(order["path"])
                index = arena.recall(path) if order["do"] == "recall" else read_checkpoint(path)
                assert index is not None
                on_bytes = stop_in_the_middle if order["do"] == "hang" else never_stop
                source = arena.open(
                    index, layout_of(index), owner=order["owner"], on_bytes=on_bytes
                )
                sources[order["owner"]] = source
                view = source.host_view()
                assert view is not None
                return hashlib.sha256(view).hexdigest()
            case "read_bytes":
                return reader.read_bytes_total
            case "close":
                sources.pop(order["owner"]).close()
        return None

    for line in sys.stdin:
        print(json.dumps(do(json.loads(line))), flush=True)


main()
