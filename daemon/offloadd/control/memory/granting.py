"""Answers those who wait for host memory, and asks for what has to give way for them.

An opening is answered once all that can come for it has come: whole, or with the pieces for which
there is room, and then the rest is read from disk. Pure, as the catalogue that this is a part of.
"""

from __future__ import annotations

from dataclasses import dataclass

from offloadd.channel.arena import ExtentOpened, ReleaseSegments, Segment
from offloadd.channel.descriptors import MOST_AT_ONCE
from offloadd.control.memory.effects import Create, Effect, Tell
from offloadd.control.memory.eviction import coldest, is_asked
from offloadd.control.memory.extents import ExtentRecord, WorkerId
from offloadd.control.memory.segment_table import SegmentTable


@dataclass(frozen=True, slots=True)
class Waiting:
    """An opening that was not answered yet."""

    worker: WorkerId
    request: int
    key: str
    model: str


class Granting:
    """Who waits, and what there is to give."""

    def __init__(self, table: SegmentTable, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.pinned_models: frozenset[str] = frozenset()
        self.waiting: list[Waiting] = []
        self._table = table

    def forget_waiting(self, worker: WorkerId, key: str | None = None) -> None:
        """A worker does not wait any more, for one extent or for any."""
        self.waiting = [
            one for one in self.waiting if one.worker != worker or key not in (None, one.key)
        ]

    def serve(self, now_s: float) -> list[Effect]:
        """Answer those who wait as far as that is possible, and keep to the budget."""
        table = self._table
        effects = self._evict(table.used_bytes - self.budget_bytes, now_s)[0]
        for waiting in list(self.waiting):
            extent = table.extents[waiting.key]
            if self._is_busy(extent, waiting.worker, now_s):
                continue
            missing = [piece for piece, number in enumerate(extent.numbers) if number is None]
            needed = sum(extent.sizes[piece] for piece in missing)
            shortfall = table.used_bytes + needed - self.budget_bytes
            evictions, must_wait = self._evict(shortfall, now_s, waiting.model)
            effects += evictions
            if must_wait:
                continue
            self.waiting.remove(waiting)
            effects += self._create(extent, missing, waiting.worker)
            effects += self._grant(extent, waiting)
        return effects

    def _is_busy(self, extent: ExtentRecord, worker: WorkerId, now_s: float) -> bool:
        return any(
            segment.is_leaving
            or (segment.checksum is None and segment.filler not in (None, worker))
            or is_asked(segment, now_s)
            for segment in self._table.present(extent)
        )

    def _evict(
        self, shortfall_bytes: int, now_s: float, for_model: str | None = None
    ) -> tuple[list[Effect], bool]:
        """Ask for the coldest segments; whether that much, or a part of it, is still to come."""
        table = self._table
        coming_bytes = sum(
            segment.size_bytes
            for segment in table.segments.values()
            if segment.is_leaving or is_asked(segment, now_s)
        )
        waited_for = {waiting.key for waiting in self.waiting}
        staying = self.pinned_models if for_model is None else self.pinned_models | {for_model}
        effects: list[Effect] = []
        asked: dict[WorkerId, list[int]] = {}
        for segment in coldest(table.segments, table.extents, waited_for, staying):
            if coming_bytes >= shortfall_bytes:
                break
            coming_bytes += segment.size_bytes
            if segment.holders:
                segment.asked_s = now_s
                for worker in segment.holders:
                    asked.setdefault(worker, []).append(segment.number)
            else:
                table.drop_pieces(segment)
                effects += table.free_unheld([segment])
        for worker, numbers in asked.items():
            effects.append(Tell(worker, ReleaseSegments(numbers=numbers)))
        return effects, shortfall_bytes > 0 and coming_bytes > 0

    def _create(self, extent: ExtentRecord, missing: list[int], worker: WorkerId) -> list[Effect]:
        effects: list[Effect] = []
        for piece in missing:
            if self._table.used_bytes + extent.sizes[piece] > self.budget_bytes:
                continue
            segment = self._table.add(extent, piece, worker)
            effects.append(Create(segment.number, segment.size_bytes))
        return effects

    def _grant(self, extent: ExtentRecord, waiting: Waiting) -> list[Effect]:
        granted: list[Segment] = []
        for piece, number in enumerate(extent.numbers):
            if number is None or self._table.segments[number].asked_s is not None:
                continue
            segment = self._table.segments[number]
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
