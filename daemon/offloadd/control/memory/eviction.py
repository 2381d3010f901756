"""Which segments give way first, and how long a request for one counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from offloadd.control.memory.extents import ExtentRecord, SegmentRecord

RELEASE_PATIENCE_S = 5.0
"""How long others wait for a worker that was asked for a segment and does not answer."""


def is_asked(segment: SegmentRecord, now_s: float) -> bool:
    """Whether its holders were asked to release it so lately that they may still do so."""
    return segment.asked_s is not None and now_s - segment.asked_s < RELEASE_PATIENCE_S


def coldest(
    segments: Mapping[int, SegmentRecord],
    extents: Mapping[str, ExtentRecord],
    waited_for: Collection[str],
    staying: Collection[str],
) -> list[SegmentRecord]:
    """The segments that may be evicted, coldest first.

    Not those of a model that stays, of an extent that somebody waits for, or that are in use.
    """

    def may_go(segment: SegmentRecord) -> bool:
        keys = {key for key, _ in segment.pieces}
        return (
            segment.is_ready
            and not segment.is_kept
            and bool(keys)
            and keys.isdisjoint(waited_for)
            and all(extents[key].models().isdisjoint(staying) for key in keys)
        )

    def warmth(segment: SegmentRecord) -> tuple[Any, ...]:
        # The last pieces of an extent go first: a pass over it then begins in memory.
        used_s = max(extents[key].used_s for key, _ in segment.pieces)
        return used_s, min(segment.pieces)[0], -min(piece for _, piece in segment.pieces)

    return sorted(filter(may_go, segments.values()), key=warmth)
