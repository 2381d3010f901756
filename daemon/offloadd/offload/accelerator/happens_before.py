"""Finds device memory that two queues touch without an order between them, whatever the timing.

Pure vector clocks. Each queue counts its operations; an event carries what its queue had seen when
it was recorded, a wait merges that into another queue. Two accesses of which one writes must be on
one queue, or the later one's queue must have seen the earlier one. What the host puts on a queue
also comes after all that the host itself has waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Party = Literal["host", "compute", "transfer"]
Clock = dict[Party, int]
_PARTIES: tuple[Party, ...] = ("host", "compute", "transfer")


@dataclass(frozen=True, slots=True)
class Access:
    """One touch of the bytes from `start` to `stop`, at the party's operation number `tick`."""

    start: int
    stop: int
    party: Party
    tick: int
    writes: bool
    purpose: str


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two accesses in conflict, and no chain of events from the first to the second."""

    first: Access
    second: Access

    def __str__(self) -> str:
        return (
            f"{self.second.party} {self.second.purpose!r} is not ordered after "
            f"{self.first.party} {self.first.purpose!r} on the same bytes"
        )


class Recorder:
    """The clocks of all parties and what they touched; `hazards` grows, nothing is raised."""

    def __init__(self) -> None:
        self.hazards: list[Hazard] = []
        self._clocks: dict[Party, Clock] = {party: dict.fromkeys(_PARTIES, 0) for party in _PARTIES}
        self._touched: dict[tuple[int, int, Party, bool], Access] = {}

    def snapshot(self, party: Party) -> Clock:
        """What an event recorded now on that party's queue stands for."""
        self._advance(party)
        return dict(self._clocks[party])

    def wait(self, party: Party, seen: Clock) -> None:
        """Order all that the party does from now on after what `seen` stands for."""
        clock = self._clocks[party]
        for other, tick in seen.items():
            clock[other] = max(clock[other], tick)

    def access(self, party: Party, start: int, stop: int, *, writes: bool, purpose: str) -> None:
        """Note a touch and compare it with every earlier one on the same bytes."""
        self._advance(party)
        clock = self._clocks[party]
        now = Access(start, stop, party, clock[party], writes, purpose)
        replaced = []
        for key, earlier in self._touched.items():
            if earlier.stop <= start or stop <= earlier.start:
                continue
            if (writes or earlier.writes) and clock[earlier.party] < earlier.tick:
                self.hazards.append(Hazard(earlier, now))
            if writes and start <= earlier.start and earlier.stop <= stop:
                replaced.append(key)
        for key in replaced:
            del self._touched[key]
        self._touched[start, stop, party, writes] = now

    def forget(self, start: int, stop: int) -> None:
        """Memory that went back to the system: what is there next has no history."""
        for key in [key for key in self._touched if start <= key[0] and key[1] <= stop]:
            del self._touched[key]

    def _advance(self, party: Party) -> None:
        clock = self._clocks[party]
        self.wait(party, self._clocks["host"])
        clock[party] += 1
