"""Runs the scripted peer as a process of its own, to be killed, stopped and started again.

Usage: python daemon_process.py ENDPOINT INSTANCE SECONDS_PER_JOB
"""

from __future__ import annotations

import sys
import time

from client.peer import Caller, Peer, finished, info_of

from offload_protocol.messages import Submit


def main() -> None:
    """Answer until killed; a job takes its time, so that it can be interrupted."""
    endpoint, instance, seconds = sys.argv[1:]
    peer = Peer(endpoint, instance)

    def draw(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request, "running"))
        time.sleep(float(seconds))
        caller.send(*finished(request.job))

    peer.answers["submit"] = draw
    peer.start()
    print("ready", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
