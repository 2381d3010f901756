"""Opens components' weights one after the other, in a thread, while others are still being built.

The disk is read from the moment that the first component is known. When this ends, however it does,
nothing is being read any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

from offload_protocol.errors import Cancelled
from offloadd.hosting.loading.parts import Part, Source, Supply, finish_part

_LOOK_EVERY_S = 0.05


class PartOpener:
    """Gives each source to `sources` and `buffers` as soon as it is open; closes none of them."""

    def __init__(self, supply: Supply, sources: dict[str, Source], buffers: list[Source]) -> None:
        self._supply = supply
        self._sources = sources
        self._buffers = buffers
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(1, "part-opener")
        self._opening: list[Future[None]] = []

    def begin(self, part: Part) -> None:
        """Open a part's weights after those that were begun before."""
        self._opening.append(self._pool.submit(self._open, part))

    def wait(self, watch: Callable[[int], None]) -> None:
        """Wait for all; `watch` is told how many are open, and may raise.

        Raises what opening raises.
        """
        for done, one in enumerate(self._opening):
            while True:
                watch(done)
                try:
                    one.result(_LOOK_EVERY_S)
                    break
                except NotYet:
                    continue

    def __enter__(self) -> PartOpener:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._pool.shutdown(cancel_futures=True)

    def _open(self, part: Part) -> None:
        weights, buffers = finish_part(part, self._supply, self._look)
        self._buffers.extend(buffers)
        self._sources[part.files.name] = self._supply.open(part.files, weights, self._look)

    def _look(self) -> None:
        if self._is_over.is_set():
            raise Cancelled("the loading that this belongs to has ended")
