"""Many clients at once, and a small client beside one that fetches large results."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import psutil
import zmq
from bench.wire_peers import Echo, WireClient

Figures = dict[str, Any]

SETTLE_S = 0.5
MB = 1_000_000


def many_clients(context: zmq.Context[Any], endpoint: str, pid: int, quick: bool) -> Figures:
    """Requests per second, p99 and fairness for 1, 8, 64 and 256 clients of one user.

    Each has one job under way at any time. `fairness` is the slowest client's mean time for a job
    over the fastest one's.
    """
    figures: Figures = {}
    for count in (1, 8, 64, 256):
        seconds = (3.0 if quick else 10.0) * (2 if count > 64 else 1)
        figures |= _round(context, endpoint, pid, count, seconds)
    return figures


def _round(
    context: zmq.Context[Any], endpoint: str, pid: int, count: int, seconds: float
) -> Figures:
    clients = [WireClient(context, endpoint, f"load-{count}-{index}") for index in range(count)]
    poller = zmq.Poller()
    for client in clients:
        client.greet()
        poller.register(client.socket, zmq.POLLIN)
    by_socket = {client.socket: client for client in clients}
    daemon = psutil.Process(pid)
    for client in clients:
        client.begin()
    _drive(poller, by_socket, time.perf_counter() + SETTLE_S)
    for client in clients:
        client.ended, client.latencies_s = 0, []
    cpu_before, start = daemon.cpu_times(), time.perf_counter()
    _drive(poller, by_socket, start + seconds)
    took, cpu = time.perf_counter() - start, daemon.cpu_times()
    for client in clients:
        client.socket.close()
    ended = [client.ended for client in clients]
    latencies = [one for client in clients for one in client.latencies_s]
    return {
        f"rps_{count}": sum(ended) / took,
        f"p50_s_{count}": statistics.median(latencies),
        f"p99_s_{count}": statistics.quantiles(latencies, n=100)[98],
        f"fairness_{count}": max(ended) / max(min(ended), 1),
        f"daemon_cores_{count}": (sum(cpu[:2]) - sum(cpu_before[:2])) / took,
        f"daemon_rss_bytes_{count}": daemon.memory_info().rss,
    }


def _drive(poller: zmq.Poller, by_socket: dict[Any, WireClient], until: float) -> None:
    while time.perf_counter() < until:
        for socket, _ in poller.poll(1000):
            client = by_socket[socket]
            if client.read():
                client.begin()


def beside_large_results(
    context: zmq.Context[Any], endpoint: str, echo: Echo, quick: bool
) -> Figures:
    """Bytes per second of large results, by a job and by bare multipart, and whom they disturb."""
    figures: Figures = {}
    large, small = (WireClient(context, endpoint, name) for name in ("large", "small"))
    large.greet()
    small.greet()
    alone = _latencies(small, 300 if quick else 1000)
    figures["small_p99_s_alone"] = statistics.quantiles(alone, n=100)[98]
    for size_mb in (1, 10, 100):
        count = max(2, (100 if quick else 400) // size_mb)
        size_bytes = size_mb * MB
        echo.fetch(size_bytes)
        bare_s, job_s = [], []
        for _ in range(count):
            start = time.perf_counter()
            echo.fetch(size_bytes)
            bare_s.append(time.perf_counter() - start)
            job_s.append(_large(large, size_bytes))
        figures[f"bytes_per_s_{size_mb}mb"] = size_bytes / statistics.median(job_s)
        figures[f"bare_bytes_per_s_{size_mb}mb"] = size_bytes / statistics.median(bare_s)
        pings = _beside(large, small, size_bytes, count)
        figures[f"ping_p50_s_beside_{size_mb}mb"] = statistics.median(pings)
        figures[f"ping_p99_s_beside_{size_mb}mb"] = statistics.quantiles(pings, n=100)[98]
    pings = [small.ping() for _ in range(500)]
    figures["ping_p50_s_alone"] = statistics.median(pings)
    figures["ping_p99_s_alone"] = statistics.quantiles(pings, n=100)[98]
    large.socket.close()
    small.socket.close()
    return figures


def _large(client: WireClient, size_bytes: int) -> float:
    client.begin(size_bytes=size_bytes)
    while not client.read():
        pass
    return client.latencies_s[-1]


def _latencies(client: WireClient, count: int) -> list[float]:
    client.latencies_s = []
    for _ in range(count):
        client.once()
    return client.latencies_s


def _beside(large: WireClient, small: WireClient, size_bytes: int, count: int) -> list[float]:
    """The small client's pings while the other one's results are made and delivered."""
    fetching = threading.Thread(
        target=lambda: [_large(large, size_bytes) for _ in range(count)], daemon=True
    )
    pings = []
    fetching.start()
    while fetching.is_alive():
        pings.append(small.ping())
    fetching.join()
    return pings
