"""Who gets host memory and who gives it up: pure decisions, events in and effects out.

Invariants, each held after every event:
- The bytes of all segments, those that are being freed included, grow only up to the budget.
- A segment is freed only when no worker holds it: its holders are asked and answer first. Each
  descriptor that was sent is given back by itself, so that a release that crosses a grant on its
  way never stands for it.
- What a worker was still filling goes with the worker; what it said was filled stays.
- A pinned model's segments are never evicted, nor are those of an extent that somebody waits for.
- Segments share a piece only after a worker has compared every byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from offloadd.channel.arena import (
    CompareSegment,
    ExtentOpened,
    OpenExtent,
    Recall,
    Recalled,
    ReleaseSegments,
    Segment,
    SegmentAccepted,
)
from offloadd.channel.descriptors import MOST_AT_ONCE
from offloadd.control.effects import Create, Effect, Free, Keep, Tell
from offloadd.control.eviction import coldest, is_asked
from offloadd.control.extents import ExtentRecord, SegmentRecord, WorkerId, model_of


@dataclass(frozen=True, slots=True)
class _Waiting:
    worker: WorkerId
    request: int
    key: str


class Catalogue:
    """Every method that takes an event gives the effects to carry out, in their order."""

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.extents: dict[str, ExtentRecord] = {}
        self.segments: dict[int, SegmentRecord] = {}
        self.pinned_models: frozenset[str] = frozenset()
        self._waiting: list[_Waiting] = []
        self._next_number = 1

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, those that are being freed included."""
        return sum(segment.size_bytes for segment in self.segments.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of segments that a worker holds page-locked; each segment counts once."""
        return sum(segment.size_bytes for segment in self.segments.values() if segment.pinners)

    def restore(self, extents: Iterable[ExtentRecord], segments: Iterable[SegmentRecord]) -> None:
        """Take over what an earlier daemon left; before any event."""
        self.extents = {extent.key: extent for extent in extents}
        self.segments = {segment.number: segment for segment in segments}
        self._next_number = max(self.segments, default=0) + 1

    # --- what workers say -----------------------------------------------------------------------

    def open(self, worker: WorkerId, asked: OpenExtent, now_s: float) -> list[Effect]:
        """A worker wants an extent's segments."""
        extent = self.extents.get(asked.key)
        if extent is None:
            sizes = tuple(asked.sizes)
            extent = ExtentRecord(asked.key, sizes, [None] * len(sizes), now_s)
            self.extents[asked.key] = extent
        extent.used_s = now_s
        extent.place, extent.about = asked.place, asked.about
        extent.owners.setdefault(asked.owner, set()).add(worker)
        self._waiting.append(_Waiting(worker, asked.request, asked.key))
        self._forget_kept()
        return self._serve(now_s)

    def filled(self, worker: WorkerId, number: int, checksum: bytes, now_s: float) -> list[Effect]:
        """A worker has written all bytes of a segment."""
        segment = self.segments.get(number)
        if segment is None or segment.filler != worker or segment.checksum is not None:
            return []
        segment.checksum = checksum
        twin = self._twin_of(segment)
        if twin is None:
            return self._accept(segment, now_s)
        segment.twin = twin.number
        twin.compared += 1
        twin.holders[worker] += 1
        message = CompareSegment(number=number, twin=twin.number)
        return [Tell(worker, message, (twin.number,))]

    def merged(self, worker: WorkerId, number: int, now_s: float) -> list[Effect]:
        """A worker found a segment equal to its twin and uses that one now."""
        segment = self._comparing(worker, number)
        if segment is None:
            return []
        twin = self._end_comparison(segment)
        for key, piece in segment.pieces:
            self.extents[key].numbers[piece] = twin.number
        twin.pieces |= segment.pieces
        segment.pieces = set()
        return self._free_unheld(self.segments.values()) + self._serve(now_s)

    def differs(self, worker: WorkerId, number: int, now_s: float) -> list[Effect]:
        """A worker keeps a segment beside its supposed twin."""
        segment = self._comparing(worker, number)
        if segment is None:
            return []
        self._end_comparison(segment)
        return self._free_unheld(self.segments.values()) + self._accept(segment, now_s)

    def damaged(self, worker: WorkerId, number: int, now_s: float) -> list[Effect]:
        """A segment's bytes are wrong: nobody else is handed them."""
        for segment in self._known([number]):
            self._drop_pieces(segment)
        return self._free_unheld(self._known([number])) + self._serve(now_s)

    def released(self, worker: WorkerId, numbers: Iterable[int], now_s: float) -> list[Effect]:
        """A worker gives descriptors back, each by one mention of its segment."""
        let_go = self._known(numbers)
        for segment in let_go:
            segment.holders[worker] -= 1
            if segment.holders[worker] > 0:
                continue
            del segment.holders[worker]
            segment.pinners.discard(worker)
            if segment.filler == worker and segment.checksum is None:
                # It gave up filling: nobody else may be handed half of the bytes.
                self._drop_pieces(segment)
        return self._free_unheld(let_go) + self._serve(now_s)

    def kept(self, worker: WorkerId, numbers: Iterable[int], now_s: float) -> list[Effect]:
        """A worker cannot let go of segments now."""
        for segment in self._known(numbers):
            segment.asked_s = None
            segment.is_kept = True
        return self._serve(now_s)

    def pinned(self, worker: WorkerId, numbers: Iterable[int], is_pinned: bool) -> None:
        """A worker has page-locked segments, or undone it."""
        for segment in self._known(numbers):
            if is_pinned and worker in segment.holders:
                segment.pinners.add(worker)
            else:
                segment.pinners.discard(worker)

    def used(self, key: str, now_s: float) -> None:
        """An extent is in use."""
        if key in self.extents:
            self.extents[key].used_s = now_s

    def close(self, worker: WorkerId, key: str, owner: str, now_s: float) -> list[Effect]:
        """An owner needs an extent no more; with its last owner the extent goes."""
        extent = self.extents.get(key)
        if extent is None or owner not in extent.owners:
            return []
        extent.owners[owner].discard(worker)
        if not extent.owners[owner]:
            del extent.owners[owner]
        self._waiting = [one for one in self._waiting if (one.worker, one.key) != (worker, key)]
        return self._drop_unowned([extent], now_s)

    def recall(self, worker: WorkerId, asked: Recall) -> list[Effect]:
        """A worker asks what is known of a place whose files may be gone."""
        known = [extent for extent in self.extents.values() if extent.place == asked.place]
        about = max(known, key=lambda extent: extent.used_s).about if known else b""
        return [Tell(worker, Recalled(request=asked.request, about=about))]

    # --- what else happens ----------------------------------------------------------------------

    def worker_lost(self, worker: WorkerId, now_s: float) -> list[Effect]:
        """A worker's process has ended, and with it every mapping that it had."""
        self._waiting = [one for one in self._waiting if one.worker != worker]
        for extent in self.extents.values():
            for workers in extent.owners.values():
                workers.discard(worker)
        effects: list[Effect] = []
        for segment in list(self.segments.values()):
            segment.holders.pop(worker, None)
            segment.pinners.discard(worker)
            if segment.filler != worker:
                continue
            if segment.checksum is None:
                self._drop_pieces(segment)
            elif segment.twin is not None:
                self._end_comparison(segment)
                segment.filler = None
                effects.append(Keep(segment.number))
        return effects + self._free_unheld(self.segments.values()) + self._serve(now_s)

    def forget(self, model: str, now_s: float) -> list[Effect]:
        """A model was unloaded: what nobody has open for it is not kept for it either."""
        extents = list(self.extents.values())
        for extent in extents:
            for owner, workers in list(extent.owners.items()):
                if model_of(owner) == model and not workers:
                    del extent.owners[owner]
        return self._drop_unowned(extents, now_s)

    def set_budget(self, budget_bytes: int, now_s: float) -> list[Effect]:
        """The budget was measured again; what is above it is asked back."""
        self.budget_bytes = budget_bytes
        self._forget_kept()
        return self._serve(now_s)

    def freed(self, number: int, now_s: float) -> list[Effect]:
        """A segment's memory has been given back."""
        del self.segments[number]
        return self._serve(now_s)

    # --- decisions ------------------------------------------------------------------------------

    def _serve(self, now_s: float) -> list[Effect]:
        """Answer those who wait as far as that is possible."""
        effects = self._evict(self.used_bytes - self.budget_bytes, now_s)[0]
        for waiting in list(self._waiting):
            extent = self.extents[waiting.key]
            if self._is_busy(extent, waiting.worker, now_s):
                continue
            missing = [piece for piece, number in enumerate(extent.numbers) if number is None]
            needed = sum(extent.sizes[piece] for piece in missing)
            evictions, must_wait = self._evict(self.used_bytes + needed - self.budget_bytes, now_s)
            effects += evictions
            if must_wait:
                continue
            self._waiting.remove(waiting)
            effects += self._create(extent, missing, waiting.worker)
            effects += self._grant(extent, waiting, now_s)
        return effects

    def _is_busy(self, extent: ExtentRecord, worker: WorkerId, now_s: float) -> bool:
        return any(
            segment.is_leaving
            or (segment.checksum is None and segment.filler not in (None, worker))
            or is_asked(segment, now_s)
            for segment in self._present(extent)
        )

    def _evict(self, shortfall_bytes: int, now_s: float) -> tuple[list[Effect], bool]:
        """Ask for the coldest segments; whether that much, or a part of it, is still to come."""
        coming_bytes = sum(
            segment.size_bytes
            for segment in self.segments.values()
            if segment.is_leaving or is_asked(segment, now_s)
        )
        waited_for = {waiting.key for waiting in self._waiting}
        effects: list[Effect] = []
        asked: dict[WorkerId, list[int]] = {}
        for segment in coldest(self.segments, self.extents, waited_for, self.pinned_models):
            if coming_bytes >= shortfall_bytes:
                break
            coming_bytes += segment.size_bytes
            if segment.holders:
                segment.asked_s = now_s
                for worker in segment.holders:
                    asked.setdefault(worker, []).append(segment.number)
            else:
                self._drop_pieces(segment)
                effects += self._free_unheld([segment])
        for worker, numbers in asked.items():
            effects.append(Tell(worker, ReleaseSegments(numbers=numbers)))
        return effects, shortfall_bytes > 0 and coming_bytes > 0

    def _create(self, extent: ExtentRecord, missing: list[int], worker: WorkerId) -> list[Effect]:
        effects: list[Effect] = []
        for piece in missing:
            size = extent.sizes[piece]
            if self.used_bytes + size > self.budget_bytes:
                break
            number, self._next_number = self._next_number, self._next_number + 1
            self.segments[number] = SegmentRecord(
                number, size, filler=worker, pieces={(extent.key, piece)}
            )
            extent.numbers[piece] = number
            effects.append(Create(number, size))
        return effects

    def _grant(self, extent: ExtentRecord, waiting: _Waiting, now_s: float) -> list[Effect]:
        granted: list[Segment] = []
        for piece, number in enumerate(extent.numbers):
            if number is None or self.segments[number].asked_s is not None:
                continue
            segment = self.segments[number]
            segment.holders[waiting.worker] += 1
            granted.append(Segment(piece=piece, number=number, checksum=segment.checksum))
        parts = [
            granted[start : start + MOST_AT_ONCE]
            for start in range(0, max(len(granted), 1), MOST_AT_ONCE)
        ]
        return [
            Tell(
                waiting.worker,
                ExtentOpened(request=waiting.request, segments=part, more=part is not parts[-1]),
                tuple(segment.number for segment in part),
            )
            for part in parts
        ]

    def _twin_of(self, segment: SegmentRecord) -> SegmentRecord | None:
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

    def _comparing(self, worker: WorkerId, number: int) -> SegmentRecord | None:
        segment = self.segments.get(number)
        is_so = segment is not None and segment.filler == worker and segment.twin is not None
        return segment if is_so else None

    def _end_comparison(self, segment: SegmentRecord) -> SegmentRecord:
        assert segment.twin is not None
        twin = self.segments[segment.twin]
        twin.compared -= 1
        segment.twin = None
        return twin

    def _accept(self, segment: SegmentRecord, now_s: float) -> list[Effect]:
        assert segment.filler is not None
        worker, segment.filler = segment.filler, None
        effects: list[Effect] = [Keep(segment.number)]
        effects.append(Tell(worker, SegmentAccepted(number=segment.number)))
        return effects + self._serve(now_s)

    def _drop_unowned(self, extents: Iterable[ExtentRecord], now_s: float) -> list[Effect]:
        for extent in extents:
            if extent.owners:
                continue
            present = list(self._present(extent))
            del self.extents[extent.key]
            for segment in present:
                segment.pieces = {one for one in segment.pieces if one[0] != extent.key}
        return self._free_unheld(self.segments.values()) + self._serve(now_s)

    def _drop_pieces(self, segment: SegmentRecord) -> None:
        for key, piece in segment.pieces:
            self.extents[key].numbers[piece] = None
        segment.pieces = set()

    def _free_unheld(self, segments: Iterable[SegmentRecord]) -> list[Effect]:
        effects: list[Effect] = []
        for segment in segments:
            unwanted = not segment.pieces or segment.asked_s is not None
            if segment.holders or segment.compared or segment.is_leaving or not unwanted:
                continue
            self._drop_pieces(segment)
            segment.is_leaving = True
            effects.append(Free(segment.number))
            if segment.twin is not None:
                effects += self._free_unheld([self._end_comparison(segment)])
        return effects

    def _present(self, extent: ExtentRecord) -> Iterator[SegmentRecord]:
        return (self.segments[number] for number in extent.numbers if number is not None)

    def _known(self, numbers: Iterable[int]) -> list[SegmentRecord]:
        return [self.segments[number] for number in numbers if number in self.segments]

    def _forget_kept(self) -> None:
        for segment in self.segments.values():
            segment.is_kept = False
