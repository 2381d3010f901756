"""What control plane and worker say about host memory: extents are opened, filled, given up.

An extent is cut into pieces; a piece that is in memory is a segment, with a number that the control
plane never uses twice. Descriptors of segments travel beside the message, in its order.
"""

from __future__ import annotations

import msgspec

from offloadd.channel.base import FromWorker, ToWorker


class OpenExtent(FromWorker, frozen=True):
    """Asks for an extent's segments; answered with one or more `ExtentOpened`.

    `key` says what the bytes are, `sizes` the pieces' bytes (whole pages), `owner` is
    `MODEL/COMPONENT`. `indexes` are kept beside the extent for `Recall`, by their places.
    """

    request: int
    key: str
    sizes: list[int]
    owner: str
    indexes: dict[str, bytes] = msgspec.field(default_factory=dict)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One piece in memory. Without a checksum its bytes are still to come, from the asker."""

    piece: int
    number: int
    checksum: bytes | None = None


class ExtentOpened(ToWorker, frozen=True):
    """Segments, each with its descriptor; pieces that are not named have no room in memory.

    More follow while `more`.
    """

    request: int
    segments: list[Segment]
    more: bool = False


class SegmentFilled(FromWorker, frozen=True):
    """All bytes of a segment are there; from here on nobody writes to it.

    Answered with `SegmentAccepted` or `CompareSegment`.
    """

    number: int
    checksum: bytes


class SegmentAccepted(ToWorker, frozen=True):
    """The segment is kept; it outlives the worker."""

    number: int


class CompareSegment(ToWorker, frozen=True):
    """Another segment, whose descriptor comes along, may hold the same bytes.

    Answered with `SegmentMerged` if every byte is the same and the worker uses the twin from now
    on, else with `SegmentDiffers`.
    """

    number: int
    twin: int


class SegmentMerged(FromWorker, frozen=True):
    """The worker has exchanged a segment for its twin, and releases the segment as well."""

    number: int
    twin: int


class SegmentDiffers(FromWorker, frozen=True):
    """The worker keeps a segment, and releases its supposed twin."""

    number: int
    twin: int


class SegmentDamaged(FromWorker, frozen=True):
    """A segment's bytes are not those of its checksum; the worker releases it as well."""

    number: int


class ReleaseSegments(ToWorker, frozen=True):
    """Asks for segments back. Answered with `SegmentsReleased` and `SegmentsKept`."""

    numbers: list[int]


class SegmentsReleased(FromWorker, frozen=True):
    """The worker has unmapped segments, asked or not.

    A number stands here once for each descriptor of it that was sent, so that a release never takes
    back what is on its way.
    """

    numbers: list[int]


class SegmentsKept(FromWorker, frozen=True):
    """These segments are being computed on or copied from."""

    numbers: list[int]


class SegmentsPinned(FromWorker, frozen=True):
    """These segments are page-locked by the worker, or no longer."""

    numbers: list[int]
    pinned: bool


class ExtentUsed(FromWorker, frozen=True):
    """The extent is in use now, so it is not the coldest."""

    key: str


class CloseExtent(FromWorker, frozen=True):
    """An owner needs the extent no more."""

    key: str
    owner: str


class Recall(FromWorker, frozen=True):
    """Asks for the index that is kept for a place; answered with `Recalled`."""

    request: int
    place: str


class Recalled(ToWorker, frozen=True):
    """What `OpenExtent.indexes` had for that place; empty if nothing is held."""

    request: int
    index: bytes = b""


class Reading(msgspec.Struct, frozen=True):
    """Bytes read from disk, and for how many seconds any reading was under way."""

    size_bytes: int = 0
    busy_s: float = 0.0


class StoreReport(FromWorker, frozen=True):
    """Totals since the worker began; `read` has them for each owner that is open now."""

    disk_read_bytes: int
    refused_pin_bytes: int = 0
    read: dict[str, Reading] = msgspec.field(default_factory=dict)


ArenaOrder = ExtentOpened | SegmentAccepted | CompareSegment | ReleaseSegments | Recalled
ArenaNews = (
    OpenExtent
    | SegmentFilled
    | SegmentMerged
    | SegmentDiffers
    | SegmentDamaged
    | SegmentsReleased
    | SegmentsKept
    | SegmentsPinned
    | ExtentUsed
    | CloseExtent
    | Recall
    | StoreReport
)
