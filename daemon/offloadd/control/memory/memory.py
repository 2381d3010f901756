"""Host memory as the control plane owns it: makes segments, hands them out, gives them back.

Carries out what the catalogue decides. Every segment is a memfd of this process; workers get
descriptors of it. Memory is punched out in a thread, so that the loop goes on answering.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from offloadd.channel.arena import (
    ArenaNews,
    CloseExtent,
    ExtentOpened,
    ExtentUsed,
    OpenExtent,
    Reading,
    Recall,
    SegmentDamaged,
    SegmentDiffers,
    SegmentFilled,
    SegmentMerged,
    SegmentsKept,
    SegmentsPinned,
    SegmentsReleased,
    StoreReport,
)
from offloadd.channel.base import ToWorker
from offloadd.channel.messages import EmbeddingFigures, LimitEmbeddings
from offloadd.control.memory import memfd
from offloadd.control.memory.catalogue import Catalogue
from offloadd.control.memory.effects import Create, Effect, Free, Keep, Tell
from offloadd.control.memory.embeddings import Embeddings
from offloadd.control.memory.extents import Held, WorkerId, deduplicated_bytes, held
from offloadd.control.memory.inheritance import Inheritance

MEASURE_EVERY_S = 2.0

Send = Callable[[WorkerId, ToWorker, Sequence[int]], None]
"""Hands a message with descriptors to one of the workers."""

_log = logging.getLogger(__name__)


class HostMemory:
    """Used on the event loop alone."""

    def __init__(
        self,
        send: Send,
        measure: Callable[[int], int],
        pinned_models: Callable[[], Collection[str]],
        clock: Callable[[], float],
        inheritance: Inheritance,
        embeddings_bytes: int = 0,
    ) -> None:
        """`measure` gives the budget, of which so many bytes are held now.

        What belongs to one of `pinned_models` stays in memory whatever else wants room. Prompt
        embeddings have what weights leave, up to `embeddings_bytes`.
        """
        self._send = send
        self._measure = measure
        self._pinned_models = pinned_models
        self._clock = clock
        self._inheritance = inheritance
        self._descriptors: dict[int, int] = {}
        self._freeing: set[asyncio.Task[None]] = set()
        self._when_free: list[Callable[[], None]] = []
        self._read_before_bytes = 0
        self._reports: dict[WorkerId, StoreReport] = {}
        self._embeddings = Embeddings(embeddings_bytes)
        left = inheritance.take_over()
        self._descriptors.update(left.descriptors)
        self.catalogue = Catalogue()
        self.catalogue.table.restore(left.extents, left.segments)
        self._measured_s = clock()
        self._do(self.catalogue.set_budget(self._budget_bytes(), clock()))

    # --- what happens ---------------------------------------------------------------------------

    def on_news(self, news: ArenaNews, worker: WorkerId = 0) -> None:
        """A worker speaks of host memory."""
        if isinstance(news, OpenExtent):
            self._measure_again()
        if isinstance(news, StoreReport):
            self._reports[worker] = news
        else:
            self._do(self._decide(worker, news))

    def worker_ready(self) -> None:
        """A new worker takes orders."""
        self._embeddings.worker_ready()
        self._limit_embeddings()

    def note_embeddings(self, figures: EmbeddingFigures) -> None:
        """The worker has said what prompt embeddings it keeps."""
        self._embeddings.note(figures)

    def worker_lost(self, worker: WorkerId = 0) -> None:
        """A worker's process has ended."""
        self._embeddings.worker_lost()
        if (report := self._reports.pop(worker, None)) is not None:
            self._read_before_bytes += report.disk_read_bytes
        self._look_at_pins()
        self._do(self.catalogue.worker_lost(worker, self._clock()))

    def forget(self, model: str, then: Callable[[], None]) -> None:
        """A model was unloaded; `then` is called once its memory has been given back."""
        self._look_at_pins()
        self._do(self.catalogue.forget(model, self._clock()))
        self._when_free.append(then)
        self._tell_if_free()

    def tick(self) -> None:
        """Measure the budget again if that was some time ago; what is above it is asked back."""
        if self._clock() - self._measured_s >= MEASURE_EVERY_S:
            self._measure_again()

    async def close(self) -> None:
        """Wait for memory that is being given back. What is left is for the next daemon."""
        while self._freeing:
            await asyncio.wait(self._freeing)
        self._inheritance.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    # --- what is shown --------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """The key `store` of the statistics."""
        catalogue = self.catalogue
        return {
            "host_budget_bytes": catalogue.budget_bytes,
            "host_used_bytes": catalogue.used_bytes + self._embeddings.size_bytes,
            "pinned_bytes": catalogue.pinned_bytes,
            "unpinnable_bytes": sum(one.refused_pin_bytes for one in self._reports.values()),
            "disk_read_bytes_total": self._read_before_bytes
            + sum(one.disk_read_bytes for one in self._reports.values()),
            "deduplicated_bytes": deduplicated_bytes(
                catalogue.extents.values(), catalogue.segments
            ),
            "segments": len(catalogue.segments),
        }

    def embedding_figures(self) -> dict[str, int]:
        """The key `embeddings` of the statistics."""
        return self._embeddings.figures()

    def held(self) -> dict[str, Held]:
        """What each component (`MODEL/COMPONENT`) has in host memory."""
        return held(self.catalogue.extents.values(), self.catalogue.segments)

    def readings(self) -> dict[str, Reading]:
        """What was read from disk for each component (`MODEL/COMPONENT`) since it was loaded."""
        found: dict[str, Reading] = {}
        for report in self._reports.values():
            for owner, reading in report.read.items():
                before = found.get(owner, Reading())
                found[owner] = Reading(
                    before.size_bytes + reading.size_bytes, before.busy_s + reading.busy_s
                )
        return found

    def real_bytes(self) -> int:
        """The memory that all segments' pages take, as the kernel counts it."""
        return sum(memfd.held_bytes(one) for one in self._descriptors.values())

    # --- how ------------------------------------------------------------------------------------

    def _decide(self, worker: WorkerId, news: ArenaNews) -> list[Effect]:
        self._look_at_pins()
        catalogue, now_s = self.catalogue, self._clock()
        match news:
            case OpenExtent():
                return catalogue.open(worker, news, now_s)
            case SegmentFilled(number=number, checksum=checksum):
                return catalogue.filled(worker, number, checksum, now_s)
            case SegmentMerged(number=number):
                return catalogue.merged(worker, number, now_s)
            case SegmentDiffers(number=number):
                return catalogue.differs(worker, number, now_s)
            case SegmentDamaged(number=number):
                _log.error("segment %d of host memory was damaged and is read again", number)
                return catalogue.damaged(worker, number, now_s)
            case SegmentsReleased(numbers=numbers):
                return catalogue.released(worker, numbers, now_s)
            case SegmentsKept(numbers=numbers):
                return catalogue.kept(worker, numbers, now_s)
            case SegmentsPinned(numbers=numbers, pinned=is_pinned):
                catalogue.pinned(worker, numbers, is_pinned)
            case ExtentUsed(key=key):
                catalogue.used(key, now_s)
            case CloseExtent(key=key, owner=owner):
                return catalogue.close(worker, key, owner, now_s)
            case Recall():
                return catalogue.recall(worker, news)
        return []

    def _limit_embeddings(self) -> None:
        left_bytes = self.catalogue.budget_bytes - self.catalogue.used_bytes
        limit_bytes = self._embeddings.new_limit(left_bytes)
        if limit_bytes is not None:
            self._send(0, LimitEmbeddings(limit_bytes=limit_bytes), ())

    def _do(self, effects: Iterable[Effect]) -> None:
        # The catalogue has decided, and nobody has been told of the memory that weights get.
        self._limit_embeddings()
        for effect in effects:
            match effect:
                case Create(number, size_bytes):
                    self._create(number, size_bytes)
                case Keep(number):
                    self._inheritance.keep(number, self._descriptors[number])
                case Tell():
                    self._tell(effect)
                case Free(number):
                    self._free(number)
        self._inheritance.note(self.catalogue.extents, self.catalogue.segments)

    def _create(self, number: int, size_bytes: int) -> None:
        try:
            self._descriptors[number] = memfd.create(f"offloadd-{number}", size_bytes)
        except OSError as error:
            _log.error("host memory: no segment of %d bytes: %s", size_bytes, error.strerror)

    def _tell(self, effect: Tell) -> None:
        message = effect.message
        lost: tuple[int, ...] = ()
        if isinstance(message, ExtentOpened):
            lost = tuple(one for one in effect.numbers if one not in self._descriptors)
            there = [one for one in message.segments if one.number not in lost]
            message = msgspec.structs.replace(message, segments=there)
        attached = [self._descriptors[one] for one in effect.numbers if one not in lost]
        self._send(effect.worker, message, attached)
        for number in lost:
            # The system had no memory or no descriptor left: that piece rests on disk.
            self._do(self.catalogue.damaged(effect.worker, number, self._clock()))

    def _free(self, number: int) -> None:
        descriptor = self._descriptors.pop(number, None)
        self._inheritance.drop(number)
        task = asyncio.get_running_loop().create_task(self._give_back(number, descriptor))
        self._freeing.add(task)
        task.add_done_callback(self._given_back)

    async def _give_back(self, number: int, descriptor: int | None) -> None:
        if descriptor is not None:
            try:
                await asyncio.to_thread(memfd.punch_out, descriptor)
            except OSError as error:
                _log.warning("segment %d could not be punched out: %s", number, error.strerror)
            finally:
                os.close(descriptor)
        self._look_at_pins()
        self._do(self.catalogue.freed(number, self._clock()))

    def _given_back(self, task: asyncio.Task[None]) -> None:
        self._freeing.discard(task)
        task.result()
        self._tell_if_free()

    def _tell_if_free(self) -> None:
        if not self._freeing:
            waiting, self._when_free = self._when_free, []
            for then in waiting:
                then()

    def _look_at_pins(self) -> None:
        self.catalogue.pinned_models = frozenset(self._pinned_models())

    def _budget_bytes(self) -> int:
        return self._measure(self.real_bytes() + self._embeddings.size_bytes)

    def _measure_again(self) -> None:
        self._look_at_pins()
        self._measured_s = self._clock()
        self._do(self.catalogue.set_budget(self._budget_bytes(), self._measured_s))
