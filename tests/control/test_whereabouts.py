"""Where a component's bytes are is told from what worker and store say, whoever is silent."""

from __future__ import annotations

from offload_protocol.records import ComponentInfo, ModelInfo
from offloadd.channel.arena import Reading
from offloadd.channel.messages import Placed
from offloadd.control.memory.extents import ExtentRecord, Held, SegmentRecord, held
from offloadd.control.memory.whereabouts import located

MODEL = ModelInfo(name="m", state="ready", components=[ComponentInfo(name="unet", bytes=10_000)])


def test_a_component_is_told_with_all_its_places() -> None:
    (part,) = located(
        MODEL,
        {"m/unet": Placed(resident_bytes=3000, streamed_bytes=7000, host_bytes=1)},
        {"m/unet": Held(host_bytes=8192, pinned_bytes=4096, shared_bytes=4096)},
        {"m/unet": Reading(size_bytes=10_000, busy_s=0.5)},
    ).components
    assert (part.resident_bytes, part.streamed_bytes) == (3000, 7000)
    assert (part.host_bytes, part.pinned_bytes, part.shared_bytes) == (8192, 4096, 4096)
    assert part.disk_bytes == 10_000 - 8192
    assert (part.read_bytes, part.read_bytes_per_s) == (10_000, 20_000)


def test_what_nobody_speaks_of_is_on_disk() -> None:
    (part,) = located(MODEL, {}, {}, {}).components
    assert part.disk_bytes == part.bytes
    assert part.host_bytes == part.read_bytes == part.read_bytes_per_s == 0


def test_whole_pages_are_no_debt_of_the_disk() -> None:
    (part,) = located(MODEL, {}, {"m/unet": Held(host_bytes=12_288)}, {}).components
    assert part.disk_bytes == 0


def test_shared_are_the_bytes_that_another_component_has_too() -> None:
    segments = {
        1: SegmentRecord(1, 4096, pieces={("a", 0), ("b", 0)}),
        2: SegmentRecord(2, 8192, pieces={("a", 1)}, pinners={0}),
        3: SegmentRecord(3, 4096, pieces={("c", 0)}),
    }
    extents = [
        ExtentRecord("a", (4096, 8192), [1, 2], 0.0, owners={"m/unet": set()}),
        ExtentRecord("b", (4096,), [1], 0.0, owners={"n/unet": set()}),
        ExtentRecord("c", (4096,), [3], 0.0, owners={"m/unet": set()}),
    ]
    found = held(extents, segments)
    assert found["m/unet"] == Held(host_bytes=16_384, pinned_bytes=8192, shared_bytes=4096)
    assert found["n/unet"] == Held(host_bytes=4096, pinned_bytes=0, shared_bytes=4096)
