"""Ends of jobs, kept until they are taken, until their time is up, or until the room is used up.

The bytes of all of them stay within one bound, of which only the newest may be larger by itself;
the oldest gives way with an error in its place that says so, and never silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_protocol import codec
from offload_protocol.errors import StorageFailed
from offload_protocol.messages import Finished

SLIGHT_BYTES = 4096
"""An end of at most this size does not give way: the errors put in place of others are such."""


@dataclass(frozen=True, slots=True)
class Result:
    """An encoded `Finished` and its frames; `job` is the name that the client gave."""

    job: str
    body: bytes
    frames: tuple[bytes, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of body and frames."""
        return len(self.body) + sum(len(frame) for frame in self.frames)


def encoded(finished: Finished, frames: Sequence[bytes] = ()) -> Result:
    """A `Finished` as it is kept and sent."""
    return Result(finished.job, codec.encode(finished), tuple(frames))


class Results:
    """Results by job key, oldest first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, Result] = {}
        self.kept_bytes = 0
        self.evicted_total = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: str, result: Result) -> None:
        """Keep a job's end; older ones give way where the room is used up."""
        self.drop(key)
        self._put(key, result)
        for other in list(self._kept):
            if self.kept_bytes <= self._max_bytes:
                return
            if other != key and self._kept[other].size_bytes > SLIGHT_BYTES:
                self._give_up(other)

    def get(self, key: str) -> Result | None:
        """The kept end of a job, or None where there is none (any more)."""
        return self._kept.get(key)

    def drop(self, key: str) -> None:
        """Forget a job's end, if it is kept."""
        result = self._kept.pop(key, None)
        if result is not None:
            self.kept_bytes -= result.size_bytes

    def _put(self, key: str, result: Result) -> None:
        self._kept[key] = result
        self.kept_bytes += result.size_bytes

    def _give_up(self, key: str) -> None:
        lost = self._kept[key]
        self.drop(key)
        error = StorageFailed(
            f"the result ({lost.size_bytes} bytes) was not taken in time and gave way to newer "
            f"ones: together they may have {self._max_bytes} bytes",
            hint="take results sooner, or raise results.max_bytes",
        )
        self._put(
            key, encoded(Finished(job=lost.job, state="failed", error=codec.error_info(error)))
        )
        self.evicted_total += 1
