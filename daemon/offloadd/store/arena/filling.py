"""Brings bytes into segments and checks those that are there: the two ways in which they are known.

A segment is filled through any source, part by part, and its checksum taken as the parts come. One
that another process filled is checked against the checksum that it left, by several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from offloadd.store.arena.checksum import PART_BYTES, checksum_of, part_checksum, parts
from offloadd.store.arena.holdings import Extent
from offloadd.store.source import WeightSource

READ_BYTES = 4 * PART_BYTES
"""How much is read at once: large enough for all reader threads to take full chunks of it."""

OnBytes = Callable[[int, int], None]
"""Told how many bytes of an extent are there, and of how many; may raise to stop."""


@dataclass(slots=True)
class Progress:
    """Counts the bytes of one opening."""

    total_bytes: int
    on_bytes: OnBytes
    done_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        self.done_bytes = min(self.done_bytes + size_bytes, self.total_bytes)
        self.on_bytes(self.done_bytes, self.total_bytes)

    def look(self) -> None:
        """Give the listener an occasion to stop the opening."""
        self.on_bytes(self.done_bytes, self.total_bytes)


def fill(
    extent: Extent,
    pieces: Sequence[int],
    source: WeightSource,
    on_filled: Callable[[int, bytes], None],
    progress: Progress,
) -> None:
    """Read pieces from their source; `on_filled` is told of each when nobody writes to it any more.

    Raises what the source's reads fail with and what the progress's listener raises; pieces that
    are not whole by then are not told of, and nothing writes to them afterwards.
    """
    waiting: list[Future[int]] = []
    try:
        plan = []
        for piece in pieces:
            futures = [
                (low, high, _read(extent, piece, low, high, source))
                for low, high in _reads(extent.sizes[piece])
            ]
            waiting += [future for _, _, future in futures]
            plan.append((piece, futures))
        for piece, futures in plan:
            view, checksum = extent.bytes_of(piece), b""
            for low, high, future in futures:
                future.result()
                checksum += checksum_of(view[low:high])
                progress.add(high - low)
            extent.memory.protect(extent.offsets[piece], extent.sizes[piece])
            on_filled(piece, checksum)
    finally:
        # The memory must not go while a thread may still write into it.
        for future in waiting:
            future.cancel()
        wait(waiting)


def _reads(size_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size_bytes, READ_BYTES):
        yield start, min(start + READ_BYTES, size_bytes)


def _read(extent: Extent, piece: int, low: int, high: int, source: WeightSource) -> Future[int]:
    start = extent.offsets[piece] + low
    # What the last page holds behind the extent's end belongs to nobody and stays zero.
    stop = min(extent.offsets[piece] + high, source.layout.size_bytes)
    return source.read(start, stop, extent.memory.writable(start, stop))


def find_damaged(
    extent: Extent,
    expected: Sequence[tuple[int, bytes]],
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> list[int]:
    """The pieces whose bytes are not those of the checksum beside them."""
    checks: list[tuple[int, int, Future[bool]]] = []
    damaged: set[int] = set()
    for piece, checksum in expected:
        view = extent.bytes_of(piece)
        ranges = list(parts(len(view)))
        if len(checksum) != 4 * len(ranges):
            damaged.add(piece)
            continue
        for at, (low, high) in enumerate(ranges):
            wanted = checksum[4 * at : 4 * at + 4]
            checks.append((piece, high - low, pool.submit(_is_sound, view[low:high], wanted)))
    try:
        for piece, size_bytes, check in checks:
            if not check.result():
                damaged.add(piece)
            progress.add(size_bytes)
    finally:
        for _, _, check in checks:
            check.cancel()
        wait([check for _, _, check in checks])
    return sorted(damaged)


def _is_sound(part: memoryview, wanted: bytes) -> bool:
    return part_checksum(part) == wanted
