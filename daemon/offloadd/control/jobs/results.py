"""Ends of jobs, kept until they are taken, until their time is up, or until the room is used up.

The bytes of all of them stay within one bound, of which only the newest may be larger by itself;
the oldest gives way with an error in its place that says so, and never silently. Large ones are on
disk as soon as the journal has written them, and are read for each delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from offload_protocol import codec
from offload_protocol.errors import InvalidRequest, StorageFailed
from offload_protocol.limits import DEFAULT_LIMITS
from offload_protocol.messages import Finished
from offloadd.control.journal.frames import Frame, FrameFile, lengths_of

SLIGHT_BYTES = 4096
"""An end of at most this size does not give way: the errors put in place of others are such."""


@dataclass(frozen=True, slots=True)
class Result:
    """An encoded `Finished` and its frames; `job` is the name that the client gave."""

    job: str
    body: bytes
    frames: tuple[Frame, ...] = ()
    file: FrameFile | None = None
    """Where the frames are instead."""

    is_in_pieces: bool = False
    """The body holds the frames' lengths, and clients read them piece by piece."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The bytes of each frame, wherever they are."""
        return self.file.lengths if self.file is not None else lengths_of(self.frames)

    @property
    def size_bytes(self) -> int:
        """Bytes of body and frames, wherever they are."""
        on_disk = self.file.size_bytes if self.file is not None else 0
        return len(self.body) + on_disk + sum(len(frame) for frame in self.frames)


def encoded(
    finished: Finished,
    frames: Sequence[Frame] = (),
    piece_bytes: int = DEFAULT_LIMITS.max_piece_bytes,
) -> Result:
    """A `Finished` as it is kept and sent; with more than `piece_bytes` of frames, in pieces."""
    lengths = lengths_of(frames)
    is_in_pieces = sum(lengths) > piece_bytes
    if is_in_pieces:
        finished = msgspec.structs.replace(finished, sizes=list(lengths))
    return Result(finished.job, codec.encode(finished), tuple(frames), is_in_pieces=is_in_pieces)


def recovered(job: str, body: bytes, frames: tuple[Frame, ...], file: FrameFile | None) -> Result:
    """A result as an earlier daemon kept it."""
    answer = codec.decode_answer(body)
    is_in_pieces = isinstance(answer, Finished) and bool(answer.sizes)
    return Result(job, body, frames, file, is_in_pieces)


class Results:
    """Results by job key, oldest first; `on_replaced` is called with one that gave way."""

    def __init__(
        self, max_bytes: int, on_replaced: Callable[[str, Result], None] = lambda key, new: None
    ) -> None:
        self._max_bytes = max_bytes
        self._on_replaced = on_replaced
        self._kept: dict[str, Result] = {}
        self.kept_bytes = 0
        self.evicted_total = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: str, result: Result) -> None:
        """Keep a job's end; older ones give way where the room is used up."""
        self.drop(key)
        self._put(key, result)
        if self.kept_bytes <= self._max_bytes:
            return
        for other in list(self._kept):
            if self.kept_bytes <= self._max_bytes:
                return
            if other != key and self._kept[other].size_bytes > SLIGHT_BYTES:
                self._give_up(other)

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def get(self, key: str) -> Result | None:
        """The kept end of a job with its frames, or None where there is none (any more)."""
        result = self._kept.get(key)
        if result is None or result.file is None:
            return result
        try:
            return replace(result, file=None, frames=result.file.read())
        except StorageFailed as error:
            self._replace(key, error)
            return self._kept[key]

    def message(self, key: str) -> tuple[Frame, ...] | None:
        """What is sent of a job's end: its body, and the frames unless they come in pieces."""
        kept = self._kept.get(key)
        if kept is not None and kept.is_in_pieces:
            return (kept.body,)
        result = self.get(key)
        return None if result is None else (result.body, *result.frames)

    def piece(self, key: str, number: int, offset: int, most_bytes: int) -> Frame:
        """At most so many bytes of a frame of a kept result.

        Raises `InvalidRequest` where it has no such frame or place, and `StorageFailed` where the
        disk fails; the result is then given up.
        """
        result = self._kept.get(key)
        lengths = result.lengths if result is not None else ()
        if result is not None and not lengths:
            raise InvalidRequest(
                "the result has no frames to read",
                hint="`finished` holds all of it; it says so where the job failed",
            )
        if result is None or not (0 <= number < len(lengths) and 0 <= offset <= lengths[number]):
            raise InvalidRequest(
                f"the result has no byte {offset} of a frame {number}",
                hint="fetch the job anew: the result may have given way to newer ones",
            )
        if result.file is None:
            return memoryview(result.frames[number]).cast("B")[offset : offset + most_bytes]
        try:
            return result.file.read_piece(number, offset, most_bytes)
        except StorageFailed as error:
            self._replace(key, error)
            raise

    def is_on_disk(self, key: str, file: FrameFile) -> None:
        """The frames of a kept result have been written: memory no longer holds them."""
        result = self._kept.get(key)
        if result is not None and result.frames:
            self._kept[key] = replace(result, file=file, frames=())

    def drop(self, key: str) -> None:
        """Forget a job's end, if it is kept."""
        result = self._kept.pop(key, None)
        if result is not None:
            self.kept_bytes -= result.size_bytes

    def _put(self, key: str, result: Result) -> None:
        self._kept[key] = result
        self.kept_bytes += result.size_bytes

    def _give_up(self, key: str) -> None:
        lost_bytes = self._kept[key].size_bytes
        error = StorageFailed(
            f"the result ({lost_bytes} bytes) was not taken in time and gave way to newer "
            f"ones: together they may have {self._max_bytes} bytes",
            hint="take results sooner, or raise results.max_bytes",
        )
        self._replace(key, error)
        self.evicted_total += 1

    def _replace(self, key: str, error: StorageFailed) -> None:
        job = self._kept[key].job
        self.drop(key)
        finished = Finished(job=job, state="failed", error=codec.error_info(error))
        self._put(key, encoded(finished))
        self._on_replaced(key, self._kept[key])
