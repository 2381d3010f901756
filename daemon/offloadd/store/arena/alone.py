"""Stands in for the control plane where there is none: in scripts, benches and tests of a process.

Grants every extent whole, from memory of this process; nothing outlives it and nothing is evicted.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence

from offload_protocol.errors import OutOfMemory
from offloadd.channel.arena import (
    ArenaOrder,
    ExtentOpened,
    OpenExtent,
    Recall,
    Recalled,
    Segment,
    SegmentAccepted,
    SegmentFilled,
)
from offloadd.channel.base import FromWorker


class Alone:
    """Answers at once, by `answer`, in the thread that says something."""

    def __init__(self) -> None:
        self.answer: Callable[[ArenaOrder, Sequence[int]], None] = lambda order, descriptors: None
        self._numbers = itertools.count(1)

    def send(self, message: FromWorker) -> None:
        """Take what a worker says. Raises `OutOfMemory` where the system has none."""
        match message:
            case OpenExtent(request=request, sizes=sizes):
                segments = [
                    Segment(piece=piece, number=next(self._numbers)) for piece in range(len(sizes))
                ]
                descriptors = [_memory(size) for size in sizes]
                self.answer(ExtentOpened(request=request, segments=segments), descriptors)
            case SegmentFilled(number=number):
                self.answer(SegmentAccepted(number=number), ())
            case Recall(request=request):
                self.answer(Recalled(request=request), ())
            case _:
                # Accounts are nobody's business here.
                return


def _memory(size_bytes: int) -> int:
    try:
        descriptor = os.memfd_create("offloadd-extent", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
    except OSError as error:
        raise OutOfMemory(
            f"no room for {size_bytes} bytes of weights in host memory: {error.strerror}",
            hint="unload a model, or let this one rest on disk",
            details={"size_bytes": size_bytes, "errno": error.errno},
        ) from error
    return descriptor
