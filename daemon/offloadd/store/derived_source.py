"""Weights that differ from their base in some ranges: what fusing adapters makes.

Promises: the base is read and never written; ranges that did not change are the base's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from offloadd.store.layout import Layout
from offloadd.store.source import WeightSource

Range = tuple[int, int]
"""First byte of the extent, and the one after the last."""


class DerivedSource:
    """A `WeightSource` over another one; `ranges` hold what replaces the base's bytes."""

    def __init__(self, base: WeightSource, ranges: Mapping[Range, memoryview]) -> None:
        for (start, stop), view in ranges.items():
            if view.nbytes != stop - start:
                raise ValueError(f"{view.nbytes} bytes for the range {start} to {stop}")
        self._base = base
        self._ranges = dict(ranges)

    @property
    def layout(self) -> Layout:
        return self._base.layout

    @property
    def derived_bytes(self) -> int:
        """Host memory that the derived ranges take."""
        return sum(view.nbytes for view in self._ranges.values())

    def derived(self, start_bytes: int, stop_bytes: int) -> memoryview | None:
        """The derived bytes of exactly or more than that range; None where the base serves."""
        for (start, stop), view in self._ranges.items():
            if start <= start_bytes and stop_bytes <= stop:
                return view[start_bytes - start : stop_bytes - start]
        return None

    def host_view(self) -> memoryview | None:
        return None

    def release_view(self) -> None:
        """No view of the whole is ever handed out."""

    def read(self, start_bytes: int, stop_bytes: int, into: memoryview) -> Future[int]:
        """See `WeightSource.read`; a range may not be derived in part."""
        view = self.derived(start_bytes, stop_bytes)
        if view is None:
            return self._base.read(start_bytes, stop_bytes, into)
        into[:] = view
        done: Future[int] = Future()
        done.set_result(0)
        return done
