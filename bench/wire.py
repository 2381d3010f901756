"""What a job costs beside its own work: the wire, the journal, the scheduler, the worker's turn.

    python bench/wire.py [--quick] [--json FILE]

A job of the built-in model `builtin:noop` takes the way of every job. Its round trip is measured in
rounds that alternate with a bare ROUTER/DEALER echo in another process, with the least that three
processes and one written row can cost (`floor`, see `wire_servers.py`), and with an empty handler
behind uvicorn and Starlette (unix socket) and behind LitServe (loopback), so that what else the
machine does meets all of them. `p50_s` is `Client.generate`, from the call to its result;
`wire_p50_s` the same by a bare DEALER that speaks the protocol. HTTP is asked over one kept-alive
connection of the standard library. Then what a job costs each process in processor time, which says
more than the clock where other programs run; many clients at once, large results, an idle client.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.wire_load import beside_large_results, many_clients
from bench.wire_peers import Echo, WireClient, daemon, free_port, http_client, server

from offload_client import Client

Figures = dict[str, Any]

IMPORT = """
import os, sys, time
start = time.perf_counter()
import offload_client
took = time.perf_counter() - start
if len(sys.argv) > 1:
    client = offload_client.Client(sys.argv[1])
    client.ping()
with open("/proc/self/smaps_rollup") as file:
    sizes = dict(line.split(":") for line in file if line.startswith(("Rss", "Pss:")))
print(took, int(sizes["Rss"].split()[0]) * 1024)
"""
BARE = (
    'print([line for line in open("/proc/self/smaps_rollup") if line[:4] == "Rss:"][0].split()[1])'
)


def main() -> int:
    options = _options()
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="wire-") as folder, ExitStack() as stack:
        directory = Path(folder)
        endpoint, pid = stack.enter_context(daemon(directory))
        echo_at = f"ipc://{directory}/echo.sock"
        stack.enter_context(server("echo", echo_at, directory))
        context: zmq.Context[Any] = stack.enter_context(zmq.Context())
        echo = Echo(context, echo_at)
        stack.callback(echo.socket.close)
        figures |= _round_trips(options.quick, endpoint, echo, directory)
        figures |= _processor_time(options.quick, endpoint, psutil.Process(pid))
        figures |= many_clients(context, endpoint, pid, options.quick)
        figures |= beside_large_results(context, endpoint, echo, options.quick)
        figures |= _an_idle_client(endpoint)
        figures["daemon_rss_bytes"] = psutil.Process(pid).memory_info().rss
    for key, value in figures.items():
        print(f"{key:32} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _round_trips(quick: bool, endpoint: str, echo: Echo, directory: Path) -> Figures:
    rounds, each = (6, 100) if quick else (20, 200)
    figures: Figures = {"round_trips": rounds * each}
    with ExitStack() as stack:
        client = stack.enter_context(Client(endpoint, program="bench"))
        wire = WireClient(echo.socket.context, endpoint, "wire")
        stack.callback(wire.socket.close)
        wire.greet()
        floor_at = f"ipc://{directory}/floor.sock"
        stack.enter_context(server("floor", floor_at, directory))
        floor = Echo(echo.socket.context, floor_at)
        stack.callback(floor.socket.close)
        ways: dict[str, Callable[[], object]] = {
            "echo": echo.once,
            "floor": floor.once,
            "": lambda: client.generate("noop", "a red circle on a white background"),
            "wire": wire.once,
        }
        for kind in ("starlette", "litserve"):
            if find_spec(kind) is None or find_spec("uvicorn") is None:
                figures[f"{kind}_skipped"] = "not installed: pip install 'offloadd[bench]'"
                continue
            place = str(directory / "http.sock") if kind == "starlette" else free_port()
            stack.enter_context(server(kind, place, directory))
            ways[kind] = http_client(place).once
        taken = _alternate(ways, rounds, each)
    for name, seconds in taken.items():
        prefix = f"{name}_" if name else ""
        figures[f"{prefix}p50_s"] = statistics.median(seconds)
        figures[f"{prefix}p99_s"] = statistics.quantiles(seconds, n=100)[98]
    for name in [name for name in taken if name not in ("", "wire")]:
        figures[f"p50_over_{name}"] = figures["p50_s"] / figures[f"{name}_p50_s"]
    figures["wire_p50_over_echo"] = figures["wire_p50_s"] / figures["echo_p50_s"]
    return figures


def _processor_time(quick: bool, endpoint: str, daemon: psutil.Process) -> Figures:
    """Seconds of processor that a job by `Client.generate` takes in each of the three processes."""
    jobs = 1000 if quick else 5000
    (worker,) = daemon.children()
    processes = {"client": psutil.Process(), "daemon": daemon, "worker": worker}
    with Client(endpoint, program="bench") as client:
        before_s = {name: sum(one.cpu_times()[:2]) for name, one in processes.items()}
        for _ in range(jobs):
            client.generate("noop", "a red circle on a white background")
        return {
            f"{name}_cpu_s": (sum(one.cpu_times()[:2]) - before_s[name]) / jobs
            for name, one in processes.items()
        }


def _alternate(
    ways: dict[str, Callable[[], object]], rounds: int, each: int
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, once in ways.items():
            for _ in range(each):
                start = time.perf_counter()
                once()
                # The first round warms up.
                if number:
                    taken[name].append(time.perf_counter() - start)
    return taken


def _an_idle_client(endpoint: str) -> Figures:
    took, rss_bytes = [], []
    for _ in range(5):
        words = _python(IMPORT, endpoint).split()
        took.append(float(words[0]))
        rss_bytes.append(int(words[1]))
    return {
        "client_import_s": statistics.median(took),
        "client_rss_bytes": round(statistics.median(rss_bytes)),
        "bare_python_rss_bytes": int(_python(BARE)) * 1024,
    }


def _python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and clients")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
