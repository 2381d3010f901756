"""Who gets host memory and who gives it up: pure decisions, events in and effects out.

Invariants, each held after every event:
- The bytes of all segments, those that are being freed included, grow only up to the budget.
- A segment is freed only when no worker holds it: its holders are asked and answer first. Each
  descriptor that was sent is given back by itself, so that a release that crosses a grant on its
  way never stands for it.
- What a worker was still filling goes with the worker; what it said was filled stays.
- A pinned model's segments are never evicted, nor are those of an extent that somebody waits for.
- No opening takes from another component of its own model: what one gains, the other would lose.
- Segments share a piece only after a worker has compared every byte.
"""

from __future__ import annotations

from collections.abc import Iterable

from offloadd.channel.arena import CompareSegment, OpenExtent, Recall, Recalled, SegmentAccepted
from offloadd.control.memory.effects import Effect, Keep, Tell
from offloadd.control.memory.extents import ExtentRecord, SegmentRecord, WorkerId, model_of
from offloadd.control.memory.granting import Granting, Waiting
from offloadd.control.memory.segment_table import SegmentTable


class Catalogue:
    """Every method that takes an event gives the effects to carry out, in their order."""

    def __init__(self, budget_bytes: int = 0) -> None:
        self.table = SegmentTable()
        self._granting = Granting(self.table, budget_bytes)

    @property
    def budget_bytes(self) -> int:
        """What all segments together may take."""
        return self._granting.budget_bytes

    @property
    def pinned_models(self) -> frozenset[str]:
        """The models whose segments stay."""
        return self._granting.pinned_models

    @pinned_models.setter
    def pinned_models(self, models: frozenset[str]) -> None:
        self._granting.pinned_models = models

    @property
    def extents(self) -> dict[str, ExtentRecord]:
        """All extents by key."""
        return self.table.extents

    @property
    def segments(self) -> dict[int, SegmentRecord]:
        """All segments by number, those that are being freed included."""
        return self.table.segments

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, those that are being freed included."""
        return self.table.used_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of segments that a worker holds page-locked; each segment counts once."""
        return sum(segment.size_bytes for segment in self.segments.values() if segment.pinners)

    # --- what workers say -----------------------------------------------------------------------

    def open(self, worker: WorkerId, asked: OpenExtent, now_s: float) -> list[Effect]:
        """A worker wants an extent's segments."""
        extent = self.extents.get(asked.key)
        if extent is None:
            sizes = tuple(asked.sizes)
            extent = ExtentRecord(asked.key, sizes, [None] * len(sizes), now_s)
            self.extents[asked.key] = extent
        extent.used_s = now_s
        extent.indexes = asked.indexes
        extent.owners.setdefault(asked.owner, set()).add(worker)
        self._granting.waiting.append(
            Waiting(worker, asked.request, asked.key, model_of(asked.owner))
        )
        self.table.forget_kept()
        return self._granting.serve(now_s)

    def filled(self, worker: WorkerId, number: int, checksum: bytes, now_s: float) -> list[Effect]:
        """A worker has written all bytes of a segment."""
        segment = self.segments.get(number)
        if segment is None or segment.filler != worker or segment.checksum is not None:
            return []
        segment.checksum = checksum
        twin = self.table.twin_of(segment)
        if twin is None:
            return self._accept(segment, now_s)
        segment.twin = twin.number
        twin.compared += 1
        twin.holders[worker] += 1
        message = CompareSegment(number=number, twin=twin.number)
        return [Tell(worker, message, (twin.number,))]

    def merged(self, worker: WorkerId, number: int, now_s: float) -> list[Effect]:
        """A worker found a segment equal to its twin and uses that one now."""
        segment = self.table.comparing(worker, number)
        if segment is None:
            return []
        self.table.merge(segment)
        return self.table.free_unheld(self.segments.values()) + self._granting.serve(now_s)

    def differs(self, worker: WorkerId, number: int, now_s: float) -> list[Effect]:
        """A worker keeps a segment beside its supposed twin."""
        segment = self.table.comparing(worker, number)
        if segment is None:
            return []
        self.table.end_comparison(segment)
        return self.table.free_unheld(self.segments.values()) + self._accept(segment, now_s)

    def damaged(self, worker: WorkerId, number: int, now_s: float) -> list[Effect]:
        """A segment's bytes are wrong: nobody else is handed them."""
        for segment in self.table.known([number]):
            self.table.drop_pieces(segment)
        return self.table.free_unheld(self.table.known([number])) + self._granting.serve(now_s)

    def released(self, worker: WorkerId, numbers: Iterable[int], now_s: float) -> list[Effect]:
        """A worker gives descriptors back, each by one mention of its segment."""
        let_go = self.table.known(numbers)
        for segment in let_go:
            segment.holders[worker] -= 1
            if segment.holders[worker] > 0:
                continue
            del segment.holders[worker]
            segment.pinners.discard(worker)
            if segment.filler == worker and segment.checksum is None:
                # It gave up filling: nobody else may be handed half of the bytes.
                self.table.drop_pieces(segment)
        return self.table.free_unheld(let_go) + self._granting.serve(now_s)

    def kept(self, worker: WorkerId, numbers: Iterable[int], now_s: float) -> list[Effect]:
        """A worker cannot let go of segments now."""
        for segment in self.table.known(numbers):
            segment.asked_s = None
            segment.is_kept = True
        return self._granting.serve(now_s)

    def pinned(self, worker: WorkerId, numbers: Iterable[int], is_pinned: bool) -> None:
        """A worker has page-locked segments, or undone it."""
        for segment in self.table.known(numbers):
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
        self._granting.forget_waiting(worker, key)
        return self._drop_unowned([extent], now_s)

    def recall(self, worker: WorkerId, asked: Recall) -> list[Effect]:
        """A worker asks what is known of a place whose files may be gone."""
        known = [extent for extent in self.extents.values() if asked.place in extent.indexes]
        last = max(known, key=lambda extent: extent.used_s, default=None)
        index = last.indexes[asked.place] if last is not None else b""
        return [Tell(worker, Recalled(request=asked.request, index=index))]

    # --- what else happens ----------------------------------------------------------------------

    def worker_lost(self, worker: WorkerId, now_s: float) -> list[Effect]:
        """A worker's process has ended, and with it every mapping that it had."""
        self._granting.forget_waiting(worker)
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
                self.table.drop_pieces(segment)
            elif segment.twin is not None:
                self.table.end_comparison(segment)
                segment.filler = None
                effects.append(Keep(segment.number))
        return (
            effects + self.table.free_unheld(self.segments.values()) + self._granting.serve(now_s)
        )

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
        self._granting.budget_bytes = budget_bytes
        self.table.forget_kept()
        return self._granting.serve(now_s)

    def freed(self, number: int, now_s: float) -> list[Effect]:
        """A segment's memory has been given back."""
        del self.segments[number]
        return self._granting.serve(now_s)

    # --- decisions ------------------------------------------------------------------------------

    def _accept(self, segment: SegmentRecord, now_s: float) -> list[Effect]:
        assert segment.filler is not None
        worker, segment.filler = segment.filler, None
        effects: list[Effect] = [Keep(segment.number)]
        effects.append(Tell(worker, SegmentAccepted(number=segment.number)))
        return effects + self._granting.serve(now_s)

    def _drop_unowned(self, extents: Iterable[ExtentRecord], now_s: float) -> list[Effect]:
        self.table.drop_unowned(extents)
        return self.table.free_unheld(self.segments.values()) + self._granting.serve(now_s)
