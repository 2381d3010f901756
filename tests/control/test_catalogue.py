"""The catalogue of host memory, driven by workers that answer late, die, and use what they hold."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offloadd.channel.arena import (
    ArenaNews,
    CloseExtent,
    CompareSegment,
    ExtentOpened,
    OpenExtent,
    ReleaseSegments,
    SegmentAccepted,
    SegmentDamaged,
    SegmentDiffers,
    SegmentFilled,
    SegmentMerged,
    SegmentsKept,
    SegmentsPinned,
    SegmentsReleased,
)
from offloadd.channel.base import ToWorker
from offloadd.control.memory.catalogue import Catalogue
from offloadd.control.memory.effects import Create, Effect, Free, Keep, Tell
from offloadd.control.memory.extents import deduplicated_bytes, held

KEYS = {"a": [4, 4, 2], "b": [4, 1], "c": [3], "d": [4, 4, 2]}
OWNERS = {"a": ["m/x", "n/x"], "b": ["m/y"], "c": ["n/z"], "d": ["o/x"]}
WORKERS = [0, 1]


@dataclass
class SimulatedWorker:
    """Knows only what it was told; `mapped` is what it really has, by extent and piece."""

    number: int
    inbox: deque[ToWorker] = field(default_factory=deque)
    outbox: deque[ArenaNews] = field(default_factory=deque)
    mapped: dict[str, dict[int, int]] = field(default_factory=dict)
    owners: dict[str, set[str]] = field(default_factory=dict)
    asking: dict[int, str] = field(default_factory=dict)
    received: Counter[int] = field(default_factory=Counter)
    unfilled: set[int] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)
    requests: int = 0

    def holds(self) -> set[int]:
        return {number for pieces in self.mapped.values() for number in pieces.values()}

    def unmap(self, numbers: set[int]) -> None:
        for pieces in self.mapped.values():
            for piece in [piece for piece, number in pieces.items() if number in numbers]:
                del pieces[piece]
        self.give_back()

    def give_back(self) -> None:
        gone = {one: count for one, count in self.received.items() if one not in self.holds()}
        for number in gone:
            del self.received[number]
            self.unfilled.discard(number)
        if gone:
            self.outbox.append(SegmentsReleased(numbers=list(Counter(gone).elements())))

    def take(self, message: ToWorker, content: dict[int, int]) -> None:
        match message:
            case ExtentOpened():
                key = self.asking[message.request]
                if not message.more:
                    del self.asking[message.request]
                for one in message.segments:
                    self.mapped.setdefault(key, {})[one.piece] = one.number
                    self.received[one.number] += 1
                self.give_back()
                self.unfilled |= {one.number for one in message.segments if one.checksum is None}
            case ReleaseSegments(numbers=numbers):
                used = {n for key in self.busy for n in self.mapped.get(key, {}).values()}
                kept = [one for one in numbers if one in used or one in self.unfilled]
                gone = [one for one in numbers if one not in kept]
                self.unmap(set(gone))
                if kept:
                    self.outbox.append(SegmentsKept(numbers=kept))
            case CompareSegment(number=number, twin=twin):
                self.received[twin] += 1
                same = content[number] == content[twin] and number in self.holds()
                if same:
                    for pieces in self.mapped.values():
                        for piece in [p for p, held in pieces.items() if held == number]:
                            pieces[piece] = twin
                kind = SegmentMerged if same else SegmentDiffers
                self.outbox.append(kind(number=number, twin=twin))
                self.give_back()
            case SegmentAccepted():
                pass


class CatalogueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue(budget_bytes=12)
        self.workers = {number: SimulatedWorker(number) for number in WORKERS}
        self.memory: dict[int, int] = {}
        self.content: dict[int, int] = {}
        self.to_free: list[int] = []
        self.final: set[int] = set()
        self.now_s = 0.0

    # --- the world --------------------------------------------------------------------------

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Create(number, size):
                    assert number not in self.memory
                    self.memory[number] = size
                    assert sum(self.memory.values()) <= self.catalogue.budget_bytes
                case Free(number):
                    assert not any(number in worker.holds() for worker in self.workers.values())
                    assert not any(number in sent for sent in self.on_their_way())
                    self.to_free.append(number)
                case Keep(number):
                    assert number in self.content
                    self.final.add(number)
                case Tell(number, message, attached):
                    assert set(attached) <= self.memory.keys() - set(self.to_free)
                    if isinstance(message, ReleaseSegments):
                        self.check_may_go(message.numbers)
                    self.workers[number].inbox.append(message)

    def on_their_way(self) -> list[set[int]]:
        return [
            {one.number for one in message.segments}
            if isinstance(message, ExtentOpened)
            else {message.twin}
            for worker in self.workers.values()
            for message in worker.inbox
            if isinstance(message, ExtentOpened | CompareSegment)
        ]

    def check_may_go(self, numbers: list[int]) -> None:
        for number in numbers:
            for key, _ in self.catalogue.segments[number].pieces:
                assert not self.catalogue.extents[key].models() & self.catalogue.pinned_models

    def hear(self, worker: int, news: ArenaNews) -> None:
        catalogue, now = self.catalogue, self.now_s
        match news:
            case OpenExtent():
                self.carry_out(catalogue.open(worker, news, now))
            case SegmentFilled():
                self.carry_out(catalogue.filled(worker, news.number, news.checksum, now))
            case SegmentMerged():
                self.carry_out(catalogue.merged(worker, news.number, now))
            case SegmentDiffers():
                self.carry_out(catalogue.differs(worker, news.number, now))
            case SegmentDamaged():
                self.carry_out(catalogue.damaged(worker, news.number, now))
            case SegmentsReleased():
                self.carry_out(catalogue.released(worker, news.numbers, now))
            case SegmentsKept():
                self.carry_out(catalogue.kept(worker, news.numbers, now))
            case SegmentsPinned():
                catalogue.pinned(worker, news.numbers, news.pinned)
            case CloseExtent():
                self.carry_out(catalogue.close(worker, news.key, news.owner, now))

    # --- what happens -----------------------------------------------------------------------

    @rule(
        worker=st.sampled_from(WORKERS), key=st.sampled_from(sorted(KEYS)), which=st.integers(0, 1)
    )
    def open(self, worker: int, key: str, which: int) -> None:
        actor = self.workers[worker]
        if key in actor.asking.values():
            return
        owner = OWNERS[key][which % len(OWNERS[key])]
        actor.requests += 1
        actor.asking[actor.requests] = key
        actor.owners.setdefault(key, set()).add(owner)
        actor.outbox.append(
            OpenExtent(request=actor.requests, key=key, sizes=KEYS[key], owner=owner)
        )

    @rule(turns=st.lists(st.sampled_from(["0 reads", "1 reads", "0 says", "1 says"]), max_size=6))
    def messages_travel(self, turns: list[str]) -> None:
        for turn in turns:
            self.one_message(int(turn[0]), turn.endswith("says"))

    @rule()
    def all_messages_travel(self) -> None:
        while any(worker.inbox or worker.outbox for worker in self.workers.values()):
            for number in WORKERS:
                self.one_message(number, True)
                self.one_message(number, False)

    def one_message(self, worker: int, is_said: bool) -> None:
        actor = self.workers[worker]
        if is_said and actor.outbox:
            self.hear(worker, actor.outbox.popleft())
        elif not is_said and actor.inbox:
            actor.take(actor.inbox.popleft(), self.content)

    @rule(worker=st.sampled_from(WORKERS), keys=st.permutations(sorted(KEYS)))
    def load(self, worker: int, keys: list[str]) -> None:
        """Open and fill a few extents, as long as messages get through."""
        for key in keys[:3]:
            self.open(worker, key, 0)
            self.all_messages_travel()
            while self.workers[worker].unfilled:
                self.fill(worker, 0, 1)
            self.all_messages_travel()

    @rule(worker=st.sampled_from(WORKERS), checksum=st.integers(0, 1), differs=st.integers(0, 3))
    def fill(self, worker: int, checksum: int, differs: int) -> None:
        actor = self.workers[worker]
        if actor.unfilled:
            number = min(actor.unfilled)
            actor.unfilled.discard(number)
            self.content[number] = checksum * 10 + (differs == 0)
            actor.outbox.append(SegmentFilled(number=number, checksum=bytes([checksum])))

    @rule(worker=st.sampled_from(WORKERS), key=st.sampled_from(sorted(KEYS)))
    def use_or_leave(self, worker: int, key: str) -> None:
        self.workers[worker].busy ^= {key}

    @rule(worker=st.sampled_from(WORKERS))
    def pin(self, worker: int) -> None:
        actor = self.workers[worker]
        actor.outbox.append(SegmentsPinned(numbers=sorted(actor.holds()), pinned=True))

    @rule(worker=st.sampled_from(WORKERS))
    def find_damage(self, worker: int) -> None:
        actor = self.workers[worker]
        whole = sorted(actor.holds() & self.final)
        if whole:
            actor.outbox.append(SegmentDamaged(number=whole[0]))
            actor.unmap({whole[0]})

    @rule(worker=st.sampled_from(WORKERS), key=st.sampled_from(sorted(KEYS)))
    def close(self, worker: int, key: str) -> None:
        actor = self.workers[worker]
        if key not in actor.owners or key in actor.asking.values():
            return
        owner = actor.owners[key].pop()
        if not actor.owners[key]:
            del actor.owners[key]
            actor.mapped.pop(key, None)
            actor.give_back()
        actor.outbox.append(CloseExtent(key=key, owner=owner))

    @rule(worker=st.sampled_from(WORKERS))
    def worker_dies(self, worker: int) -> None:
        self.workers[worker] = SimulatedWorker(worker)
        self.carry_out(self.catalogue.worker_lost(worker, self.now_s))
        for segment in self.catalogue.segments.values():
            assert segment.is_leaving or segment.checksum is not None or segment.filler != worker
            assert worker not in segment.holders
            assert worker not in segment.pinners

    @rule(model=st.sampled_from(["m", "n", "o"]))
    def pin_or_unpin_model(self, model: str) -> None:
        self.catalogue.pinned_models ^= {model}

    @rule(model=st.sampled_from(["m", "n", "o"]))
    def forget(self, model: str) -> None:
        self.carry_out(self.catalogue.forget(model, self.now_s))

    @rule(budget=st.integers(0, 30))
    def measure(self, budget: int) -> None:
        self.carry_out(self.catalogue.set_budget(budget, self.now_s))

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.to_free)
    @rule()
    def memory_is_freed(self) -> None:
        number = self.to_free.pop(0)
        del self.memory[number]
        self.carry_out(self.catalogue.freed(number, self.now_s))

    # --- what always holds ------------------------------------------------------------------

    @invariant()
    def accounts_are_the_memory_that_exists(self) -> None:
        assert self.catalogue.used_bytes == sum(self.memory.values())
        assert self.catalogue.pinned_bytes <= self.catalogue.used_bytes
        segments = self.catalogue.segments
        assert deduplicated_bytes(self.catalogue.extents.values(), segments) >= 0
        for one in held(self.catalogue.extents.values(), segments).values():
            assert 0 <= one.pinned_bytes <= one.host_bytes

    @invariant()
    def extents_and_segments_tell_the_same(self) -> None:
        seen: dict[int, set[tuple[str, int]]] = {}
        for key, extent in self.catalogue.extents.items():
            assert extent.owners
            for piece, number in enumerate(extent.numbers):
                if number is not None:
                    seen.setdefault(number, set()).add((key, piece))
                    assert self.catalogue.segments[number].size_bytes == extent.sizes[piece]
                    assert not self.catalogue.segments[number].is_leaving
        for number, segment in self.catalogue.segments.items():
            assert segment.pieces == seen.get(number, set())

    @invariant()
    def shared_segments_hold_the_same_bytes(self) -> None:
        for worker in self.workers.values():
            for key, pieces in worker.mapped.items():
                for piece, number in pieces.items():
                    assert KEYS[key][piece] == self.memory[number]

    def teardown(self) -> None:
        """Everybody gets an answer once workers let go of what they hold, and nothing is lost."""
        self.now_s += 100.0
        for _ in range(2000):
            moved = False
            for number, worker in self.workers.items():
                worker.busy.clear()
                if worker.inbox:
                    worker.take(worker.inbox.popleft(), self.content)
                    moved = True
                if worker.unfilled:
                    self.fill(number, 0, 1)
                if worker.outbox:
                    self.hear(number, worker.outbox.popleft())
                    moved = True
            if self.to_free:
                self.memory_is_freed()
                moved = True
            if not moved:
                break
        assert not any(worker.asking for worker in self.workers.values())
        for number in WORKERS:
            self.worker_dies(number)
        for model in "mno":
            self.forget(model)
        while self.to_free:
            self.memory_is_freed()
        assert not self.memory


TestCatalogue = CatalogueMachine.TestCase
TestCatalogue.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
