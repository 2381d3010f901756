"""What the catalogue of host memory knows: extents, the segments that hold them, and the accounts.

Plain state, changed by the catalogue alone. A segment may hold pieces of several extents, where
their bytes were found to be the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

WorkerId = int


@dataclass(slots=True, eq=False)
class SegmentRecord:
    """One memfd. Without a checksum, `filler` is writing to it; `leaving` ones are being freed."""

    number: int
    size_bytes: int
    checksum: bytes | None = None
    filler: WorkerId | None = None
    pieces: set[tuple[str, int]] = field(default_factory=set)
    """The places in extents that it holds: (key, piece)."""
    holders: Counter[WorkerId] = field(default_factory=Counter)
    """How many descriptors of it each worker was sent and has not given back."""
    pinners: set[WorkerId] = field(default_factory=set)
    asked_s: float | None = None
    """When its holders were asked to release it; None while nobody was."""
    is_kept: bool = False
    """A holder has said lately that it is in use."""
    twin: int | None = None
    """The segment that the filler compares it with."""
    compared: int = 0
    """How many others are being compared with it."""
    is_leaving: bool = False

    @property
    def is_ready(self) -> bool:
        """Its bytes are all there and nothing else is going on with it."""
        return (
            self.checksum is not None
            and self.twin is None
            and self.compared == 0
            and self.asked_s is None
            and not self.is_leaving
        )


@dataclass(slots=True, eq=False)
class ExtentRecord:
    """One extent; `numbers` has None where a piece rests on disk alone."""

    key: str
    sizes: tuple[int, ...]
    numbers: list[int | None]
    used_s: float
    indexes: dict[str, bytes] = field(default_factory=dict)
    """What `Recall` is answered with, by place."""
    owners: dict[str, set[WorkerId]] = field(default_factory=dict)
    """`MODEL/COMPONENT`, and the workers that have it open; none while its worker is away."""

    def models(self) -> set[str]:
        """The names of the models that own it."""
        return {model_of(owner) for owner in self.owners}


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one component in host memory; how many are page-locked, and used by others too."""

    host_bytes: int = 0
    pinned_bytes: int = 0
    shared_bytes: int = 0


def model_of(owner: str) -> str:
    """The model of `MODEL/COMPONENT`; names of components hold no slash, names of models may."""
    return owner.rpartition("/")[0]


def deduplicated_bytes(extents: Iterable[ExtentRecord], segments: dict[int, SegmentRecord]) -> int:
    """How much more memory the extents would take if each owner had its own copy."""
    owned = sum(
        segments[number].size_bytes * max(len(extent.owners), 1)
        for extent in extents
        for number in extent.numbers
        if number is not None
    )
    return owned - sum(segment.size_bytes for segment in segments.values() if segment.pieces)


def held(extents: Iterable[ExtentRecord], segments: dict[int, SegmentRecord]) -> dict[str, Held]:
    """What each owner has in host memory; shared bytes count for each of them."""
    known = {extent.key: extent for extent in extents}
    found: dict[str, Held] = {}
    for extent in known.values():
        present = [segments[number] for number in extent.numbers if number is not None]
        host_bytes = sum(segment.size_bytes for segment in present)
        pinned_bytes = sum(segment.size_bytes for segment in present if segment.pinners)
        for owner in extent.owners:
            shared_bytes = sum(
                segment.size_bytes for segment in present if _others(segment, owner, known)
            )
            before = found.get(owner, Held())
            found[owner] = Held(
                before.host_bytes + host_bytes,
                before.pinned_bytes + pinned_bytes,
                before.shared_bytes + shared_bytes,
            )
    return found


def _others(segment: SegmentRecord, owner: str, extents: dict[str, ExtentRecord]) -> bool:
    return any(other != owner for key, _ in segment.pieces for other in extents[key].owners)
