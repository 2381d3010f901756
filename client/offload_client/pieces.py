"""A large result on its way: which pieces are still to be asked for, and what has come; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from offload_protocol.errors import InvalidRequest
from offload_protocol.messages import Finished
from offload_protocol.values import Frame

WINDOW = 4
"""Pieces under way at a time: enough to keep the connection busy, and bounded for the daemon."""

Place = tuple[int, int]
"""A frame's number and where in it a piece begins, in bytes."""


class Pieces:
    """The frames of one result while they arrive; `finished` is handed over when all are there."""

    def __init__(self, finished: Finished, piece_bytes: int, most_bytes: int) -> None:
        """Raises `InvalidRequest` for more than `most_bytes` in all."""
        sizes = finished.sizes
        if sum(sizes) > most_bytes or any(size < 0 for size in sizes):
            raise InvalidRequest(
                f"the result of job {finished.job} is said to have {sum(sizes)} bytes, "
                f"the limit is {most_bytes}"
            )
        self.finished = finished
        self._piece_bytes = piece_bytes
        self._frames = [bytearray(size) for size in sizes]
        self._to_ask = _places(sizes, piece_bytes)
        self._missing_bytes = sum(sizes)

    def to_ask(self, count: int = 1) -> list[Place]:
        """The next pieces to ask for, at most so many; each is given once."""
        return list(islice(self._to_ask, count))

    def came(self, place: Place, data: Frame) -> None:
        """A piece is there; raises `InvalidRequest` where it is not what was asked for."""
        number, start = place
        whole = self._frames[number]
        expected = min(self._piece_bytes, len(whole) - start)
        if len(data) != expected:
            raise InvalidRequest(
                f"a piece of job {self.finished.job} has {len(data)} bytes instead of {expected}"
            )
        whole[start : start + expected] = data
        self._missing_bytes -= expected

    @property
    def are_all_there(self) -> bool:
        """Nothing is missing."""
        return self._missing_bytes == 0

    def frames(self) -> list[Frame]:
        """The frames, read-only."""
        return [memoryview(frame).toreadonly() for frame in self._frames]


def _places(sizes: Sequence[int], piece_bytes: int) -> Iterator[Place]:
    return (
        (number, start)
        for number, size in enumerate(sizes)
        for start in range(0, size, piece_bytes)
    )
