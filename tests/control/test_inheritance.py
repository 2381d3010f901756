"""What one daemon leaves to the next, and what the next one does not believe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from control.manager import Manager

from offloadd.control.memory import memfd
from offloadd.control.memory.extents import ExtentRecord, SegmentRecord
from offloadd.control.memory.inheritance import Inheritance, Left

SIZE = 8192


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.close()


class Daemon:
    """The segments and extents of one daemon's life."""

    def __init__(self, manager: Manager) -> None:
        self.inheritance = Inheritance(manager)
        self.left = self.inheritance.take_over()
        self.extents = {one.key: one for one in self.left.extents}
        self.segments = {one.number: one for one in self.left.segments}
        self.descriptors = dict(self.left.descriptors)

    def add(self, key: str, number: int, content: bytes) -> None:
        descriptor = memfd.create("test", SIZE)
        os.pwrite(descriptor, content, 0)
        self.descriptors[number] = descriptor
        self.segments[number] = SegmentRecord(
            number, SIZE, checksum=b"sum" + content, pieces={(key, 0)}
        )
        owners: dict[str, set[int]] = {"m/unet": {0}}
        self.extents[key] = ExtentRecord(
            key, (SIZE, SIZE), [number, None], 1.0, {"place": b"index"}, owners
        )
        self.inheritance.keep(number, descriptor)
        self.inheritance.note(self.extents, self.segments)

    def dies(self) -> None:
        self.inheritance.close()
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def reborn(manager: Manager) -> Left:
    """What a daemon finds that starts now; it dies at once."""
    daemon = Daemon(manager)
    daemon.dies()
    return daemon.left


def test_segments_come_back_with_what_they_are(manager: Manager) -> None:
    first = Daemon(manager)
    first.add("key", 7, b"weights")
    first.dies()
    second = Daemon(manager)
    (extent,) = second.left.extents
    assert (extent.key, extent.sizes, extent.numbers) == ("key", (SIZE, SIZE), [7, None])
    assert extent.indexes == {"place": b"index"}
    assert extent.owners == {"m/unet": set()}
    (segment,) = second.left.segments
    assert (segment.number, segment.size_bytes, segment.checksum) == (7, SIZE, b"sumweights")
    assert segment.pieces == {("key", 0)}
    assert os.pread(second.left.descriptors[7], 7, 0) == b"weights"
    second.dies()


def test_they_come_back_again_after_a_daemon_that_changed_nothing(manager: Manager) -> None:
    first = Daemon(manager)
    first.add("key", 1, b"x")
    first.dies()
    assert reborn(manager) is not None
    assert [one.number for one in reborn(manager).segments] == [1]


def test_an_index_that_was_half_written_leaves_the_one_before(manager: Manager) -> None:
    first = Daemon(manager)
    first.add("a", 1, b"x")
    first.add("b", 2, b"y")
    # The daemon was killed while it wrote the half in which the last index stands.
    index, at = manager.kept["index"], first.inheritance._sequence % 2
    os.pwrite(index, b"\0" * 200, at * (256 << 20) + 40)
    first.dies()
    left = reborn(manager)
    assert [one.key for one in left.extents] == ["a"]
    assert [one.number for one in left.segments] == [1]
    # What no index explains is nobody's weights.
    assert "segment-2" not in manager.kept


def test_without_an_index_nothing_is_believed_and_memory_goes(manager: Manager) -> None:
    first = Daemon(manager)
    first.add("a", 1, b"x")
    first.dies()
    witness = os.dup(manager.kept["segment-1"])
    os.close(manager.kept.pop("index"))
    assert reborn(manager) == Left()
    assert manager.kept == {}
    assert memfd.held_bytes(witness) == 0
    os.close(witness)


def test_a_segment_of_another_size_or_kind_is_not_believed(manager: Manager) -> None:
    first = Daemon(manager)
    first.add("a", 1, b"x")
    first.dies()
    os.close(manager.kept["segment-1"])
    unsealed = os.memfd_create("other")
    os.ftruncate(unsealed, SIZE)
    manager.kept["segment-1"] = unsealed
    assert reborn(manager) == Left()


def test_a_dropped_segment_is_gone_from_the_store(manager: Manager) -> None:
    first = Daemon(manager)
    first.add("a", 1, b"x")
    first.inheritance.drop(1)
    assert set(manager.kept) == {"index"}
    first.dies()


def test_without_a_manager_nothing_is_kept() -> None:
    inheritance = Inheritance(None)
    assert inheritance.take_over() == Left()
    inheritance.keep(1, -1)
    inheritance.note({}, {})
    inheritance.close()
