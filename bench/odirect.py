"""The best rate at which this machine reads a file with O_DIRECT: the bound that benches divide by.

Plain preadv into fresh anonymous memory, nothing else: no checks, no copies, no alignment beyond
what the kernel wants. The best over thread counts and chunk sizes is what a reader could reach.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024
THREADS = (1, 2, 4, 8)
CHUNKS_BYTES = (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)


@dataclass(frozen=True, slots=True)
class BestRate:
    """The highest rate found, and the threads and chunk size that gave it."""

    bytes_per_s: float
    threads: int
    chunk_bytes: int


def best_rate(
    path: Path,
    *,
    threads: Sequence[int] = THREADS,
    chunks_bytes: Sequence[int] = CHUNKS_BYTES,
    limit_bytes: int = 512 * MIB,
) -> BestRate:
    """Try every pair on the file's first `limit_bytes` and keep the best.

    Takes about `len(threads) * len(chunks_bytes) * limit_bytes / rate`. Raises `OSError` where the
    file system has no O_DIRECT.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        size = min(os.fstat(descriptor).st_size, limit_bytes) // MIB * MIB
        return max(
            (
                BestRate(rate(descriptor, size, count, chunk), count, chunk)
                for count in threads
                for chunk in chunks_bytes
            ),
            key=lambda found: found.bytes_per_s,
        )
    finally:
        os.close(descriptor)


def rate(descriptor: int, size_bytes: int, threads: int, chunk_bytes: int) -> float:
    """Bytes per second of one pass over the file's start, into memory that was never touched."""
    with mmap.mmap(-1, size_bytes) as memory, memoryview(memory) as view:
        offsets = iter(range(0, size_bytes, chunk_bytes))
        taking = threading.Lock()
        failures: list[OSError] = []

        def work() -> None:
            while True:
                with taking:
                    start = next(offsets, None)
                if start is None:
                    return
                try:
                    os.preadv(descriptor, [view[start : start + chunk_bytes]], start)
                except OSError as error:
                    failures.append(error)
                    return

        workers = [threading.Thread(target=work) for _ in range(threads)]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        taken_s = time.perf_counter() - begin
    if failures:
        raise failures[0]
    return size_bytes / taken_s


def drop_caches() -> bool:
    """Empty the page cache; False where this process may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    except OSError:
        return False
    return True
