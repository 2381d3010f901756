"""The extents and segments of host memory and the small moves on them that keep both in step.

Promises: whatever these do, `SegmentRecord.pieces` and `ExtentRecord.numbers` tell the same, and a
segment is given up for freeing only once nobody holds it or compares with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from offloadd.control.memory.effects import Effect, Free
from offloadd.control.memory.extents import ExtentRecord, SegmentRecord, WorkerId


class SegmentTable:
    """State of the catalogue; decides nothing."""

    def __init__(self) -> None:
        self.extents: dict[str, ExtentRecord] = {}
        self.segments: dict[int, SegmentRecord] = {}
        self._next_number = 1

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, those that are being freed included."""
        return sum(segment.size_bytes for segment in self.segments.values())

    def restore(self, extents: Iterable[ExtentRecord], segments: Iterable[SegmentRecord]) -> None:
        """Take over what an earlier daemon left; before any event."""
        self.extents = {extent.key: extent for extent in extents}
        self.segments = {segment.number: segment for segment in segments}
        self._next_number = max(self.segments, default=0) + 1

    def add(self, extent: ExtentRecord, piece: int, worker: WorkerId) -> SegmentRecord:
        """A new segment for a piece that has none, which the worker is to fill."""
        number, self._next_number = self._next_number, self._next_number + 1
        segment = SegmentRecord(
            number, extent.sizes[piece], filler=worker, pieces={(extent.key, piece)}
        )
        self.segments[number] = segment
        extent.numbers[piece] = number
        return segment

    def present(self, extent: ExtentRecord) -> Iterator[SegmentRecord]:
        """The segments that an extent has."""
        return (self.segments[number] for number in extent.numbers if number is not None)

    def known(self, numbers: Iterable[int]) -> list[SegmentRecord]:
        """Those of these segments that still exist."""
        return [self.segments[number] for number in numbers if number in self.segments]

    def comparing(self, worker: WorkerId, number: int) -> SegmentRecord | None:
        """The segment, if that worker is comparing it with its twin."""
        segment = self.segments.get(number)
        is_so = segment is not None and segment.filler == worker and segment.twin is not None
        return segment if is_so else None

    def twin_of(self, segment: SegmentRecord) -> SegmentRecord | None:
        """A finished segment whose size and checksum propose that its bytes are the same."""
        return next(
            (
                other
                for other in self.segments.values()
                if other.is_ready
                and other is not segment
                and other.size_bytes == segment.size_bytes
                and other.checksum == segment.checksum
            ),
            None,
        )

    def end_comparison(self, segment: SegmentRecord) -> SegmentRecord:
        """A segment is no longer compared with its twin; gives the twin."""
        assert segment.twin is not None
        twin = self.segments[segment.twin]
        twin.compared -= 1
        segment.twin = None
        return twin

    def merge(self, segment: SegmentRecord) -> None:
        """The twin takes over every piece of a segment."""
        twin = self.end_comparison(segment)
        for key, piece in segment.pieces:
            self.extents[key].numbers[piece] = twin.number
        twin.pieces |= segment.pieces
        segment.pieces = set()

    def drop_pieces(self, segment: SegmentRecord) -> None:
        """No extent has a segment any more."""
        for key, piece in segment.pieces:
            self.extents[key].numbers[piece] = None
        segment.pieces = set()

    def drop_unowned(self, extents: Iterable[ExtentRecord]) -> None:
        """Forget those of these extents that nobody owns."""
        for extent in extents:
            if extent.owners:
                continue
            present = list(self.present(extent))
            del self.extents[extent.key]
            for segment in present:
                segment.pieces = {one for one in segment.pieces if one[0] != extent.key}

    def free_unheld(self, segments: Iterable[SegmentRecord]) -> list[Effect]:
        """Free those of these segments that nobody wants and nobody holds."""
        effects: list[Effect] = []
        for segment in segments:
            unwanted = not segment.pieces or segment.asked_s is not None
            if segment.holders or segment.compared or segment.is_leaving or not unwanted:
                continue
            self.drop_pieces(segment)
            segment.is_leaving = True
            effects.append(Free(segment.number))
            if segment.twin is not None:
                effects += self.free_unheld([self.end_comparison(segment)])
        return effects

    def forget_kept(self) -> None:
        """What was in use a while ago may be asked for again."""
        for segment in self.segments.values():
            segment.is_kept = False
