"""Host memory between a control plane and its workers: shared, evicted, pinned, given back."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from arena.conftest import Mapped
from arena.rig import PIECE_BYTES, Rig, rig
from control.manager import Manager
from store.checkpoints import arrays, assert_holds, layout_of, open_descriptors, write_file

from offloadd.store.arena.source import ArenaSource
from offloadd.store.index import CheckpointIndex, read_checkpoint

SIZES = {"a": (300, 100), "b": (7,), "c": (500, 200)}


def checkpoint(path: Path, seed: int = 0) -> CheckpointIndex:
    return read_checkpoint(write_file(path, arrays(SIZES, seed)))


def held_by_the_kernel(rig: Rig) -> int:
    return rig.memory.real_bytes()


async def opened(worker: object, index: CheckpointIndex, owner: str) -> ArenaSource:
    arena = worker.arena  # type: ignore[attr-defined]
    source = await asyncio.to_thread(arena.open, index, layout_of(index), owner=owner)
    assert isinstance(source, ArenaSource)
    return source


def assert_right(source: ArenaSource, seed: int = 0) -> None:
    memory = memoryview(bytearray(source.layout.size_bytes))
    source.read(0, len(memory), memory).result()
    assert_holds(memory, source.layout, arrays(SIZES, seed))


async def test_case_17_the_accounts_are_what_the_kernel_gave_to_the_page(tmp_path: Path) -> None:
    async with rig() as it:
        worker = await it.local()
        index = checkpoint(tmp_path / "m.safetensors")
        source = await opened(worker, index, "m/unet")
        await it.until(lambda: not any(s.filler for s in it.memory.catalogue.segments.values()))
        size = -(-source.layout.size_bytes // 4096) * 4096
        assert it.figure("host_used_bytes") == held_by_the_kernel(it) == size
        assert it.memory.held()["m/unet"].host_bytes == size
        await it.until(lambda: it.figure("disk_read_bytes_total") == index.size_bytes)
        source.close()


async def test_case_17_pinned_bytes_are_those_that_were_really_pinned(tmp_path: Path) -> None:
    pinned: list[int] = []

    def pin(view: memoryview) -> Callable[[], None]:
        pinned.append(view.nbytes)
        return lambda: pinned.remove(view.nbytes)

    async with rig() as it:
        worker = await it.local(pin=pin)
        source = await opened(worker, checkpoint(tmp_path / "m.safetensors"), "m/unet")
        used = it.figure("host_used_bytes")
        await it.until(lambda: it.figure("pinned_bytes") == used)
        assert sum(pinned) == used
        assert max(pinned) <= PIECE_BYTES
        assert it.memory.held()["m/unet"].pinned_bytes == used
        source.close()
        assert pinned == []
        await it.until(lambda: it.figure("pinned_bytes") == 0)


async def test_case_18_a_refused_pin_is_slower_and_shown_but_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    granted = 2

    def pin(view: memoryview) -> Callable[[], None] | None:
        nonlocal granted
        granted -= 1
        return (lambda: None) if granted >= 0 else None

    async with rig() as it:
        worker = await it.local(pin=pin)
        with caplog.at_level(logging.WARNING):
            source = await opened(worker, checkpoint(tmp_path / "m.safetensors"), "m/unet")
            used = it.figure("host_used_bytes")
            await it.until(lambda: it.figure("unpinnable_bytes") == used - 2 * PIECE_BYTES)
        assert it.figure("pinned_bytes") == 2 * PIECE_BYTES
        warnings = [one for one in caplog.records if "page-locked" in one.message]
        assert len(warnings) == 1
        assert_right(source)
        source.close()


async def test_case_19_and_20_rounds_of_loading_leave_nothing_behind(
    tmp_path: Path, mapped: Mapped
) -> None:
    indexes = [checkpoint(tmp_path / f"{seed}.safetensors", seed) for seed in range(3)]
    async with rig() as it:
        worker = await it.local()
        counts = []
        for _ in range(12):
            for seed, index in enumerate(indexes):
                source = await opened(worker, index, f"m{seed}/unet")
                view = source.host_view()
                assert view is not None
                assert_holds(view, source.layout, arrays(SIZES, seed))
                del view
                source.close()
                gone = asyncio.Event()
                it.memory.forget(f"m{seed}", gone.set)
                await gone.wait()
                await it.until(lambda: it.figure("host_used_bytes") == 0)
            gc.collect()
            counts.append((open_descriptors(), len(mapped()), held_by_the_kernel(it)))
        assert counts[0] == counts[-1]
        assert counts[-1][1:] == (0, 0)


async def test_what_has_no_room_rests_on_disk_and_is_right(tmp_path: Path) -> None:
    async with rig(budget_bytes=2 * PIECE_BYTES) as it:
        worker = await it.local()
        source = await opened(worker, checkpoint(tmp_path / "m.safetensors"), "m/unet")
        assert source.host_view() is None
        assert source.host_bytes == 2 * PIECE_BYTES
        assert it.figure("host_used_bytes") == 2 * PIECE_BYTES
        assert_right(source)
        source.close()


async def test_the_coldest_gives_way_and_comes_back(tmp_path: Path) -> None:
    size = layout_of(checkpoint(tmp_path / "0.safetensors")).size_bytes
    async with rig(budget_bytes=2 * (size + 4096)) as it:
        worker = await it.local()
        indexes = [checkpoint(tmp_path / f"{seed}.safetensors", seed) for seed in range(3)]
        sources = []
        for seed, index in enumerate(indexes):
            it.now_s += 1
            sources.append(await opened(worker, index, f"m{seed}/unet"))
            assert it.figure("host_used_bytes") <= it.budget_bytes
        assert [source.host_bytes == sources[2].host_bytes for source in sources[1:]] == [True] * 2
        assert sources[0].host_bytes < size
        for seed, source in enumerate(sources):
            assert_right(source, seed)
        it.now_s += 1
        again = await opened(worker, indexes[0], "m0/again")
        assert again.host_view() is not None
        assert sources[1].host_bytes < size
        assert_right(sources[1], 1)
        for source in [*sources, again]:
            source.close()


async def test_what_is_computed_on_and_what_is_pinned_stays(tmp_path: Path) -> None:
    size = layout_of(checkpoint(tmp_path / "0.safetensors")).size_bytes
    async with rig(budget_bytes=2 * (size + 4096)) as it:
        worker = await it.local()
        indexes = [checkpoint(tmp_path / f"{seed}.safetensors", seed) for seed in range(3)]
        in_use = await opened(worker, indexes[0], "m0/unet")
        view = in_use.host_view()
        kept = await opened(worker, indexes[1], "m1/unet")
        it.pinned_models.add("m1")
        late = await opened(worker, indexes[2], "m2/unet")
        assert view is not None
        assert_holds(view, in_use.layout, arrays(SIZES, 0))
        assert kept.host_view() is not None
        assert late.host_bytes < PIECE_BYTES
        assert_right(late, 2)
        for source in (in_use, kept, late):
            source.close()


async def test_a_shrinking_budget_takes_memory_back(tmp_path: Path) -> None:
    async with rig() as it:
        worker = await it.local()
        source = await opened(worker, checkpoint(tmp_path / "m.safetensors"), "m/unet")
        it.budget_bytes = PIECE_BYTES
        it.now_s += 10
        it.memory.tick()
        await it.until(lambda: it.figure("host_used_bytes") <= PIECE_BYTES)
        assert held_by_the_kernel(it) <= PIECE_BYTES
        assert_right(source)
        source.close()


async def test_equal_bytes_in_different_files_are_held_once(tmp_path: Path) -> None:
    async with rig() as it:
        worker = await it.local()
        first = await opened(worker, checkpoint(tmp_path / "a.safetensors"), "m/text_encoder")
        once = it.figure("host_used_bytes")
        shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        view_before = first.host_view()
        copy = read_checkpoint(tmp_path / "b.safetensors")
        second = await opened(worker, copy, "n/text_encoder")
        await it.until(lambda: it.figure("host_used_bytes") == once)
        assert it.figure("deduplicated_bytes") == once
        assert held_by_the_kernel(it) == once
        first.close()
        del view_before
        assert_right(second)
        await it.until(lambda: it.figure("deduplicated_bytes") == 0)
        assert it.figure("host_used_bytes") == once
        second.close()
        await it.until(lambda: it.figure("host_used_bytes") == 0)


async def test_one_file_in_two_models_is_held_once(tmp_path: Path) -> None:
    async with rig() as it:
        worker = await it.local()
        index = checkpoint(tmp_path / "a.safetensors")
        sources = [await opened(worker, index, owner) for owner in ("m/vae", "n/vae")]
        assert it.figure("deduplicated_bytes") == it.figure("host_used_bytes")
        for source in sources:
            source.close()


async def test_a_worker_that_comes_back_reads_nothing_though_the_files_are_gone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.safetensors"
    index = checkpoint(path)
    async with rig() as it:
        first = await it.process()
        digest = await first.ask("open", path=str(path), owner="m/unet")
        await it.until(lambda: it.figure("disk_read_bytes_total") == index.size_bytes)
        await first.kill()
        await it.lost()
        path.rename(tmp_path / "elsewhere")
        second = await it.process()
        assert await second.ask("recall", path=str(path), owner="m/unet") == digest
        assert await second.ask("read_bytes") == 0
        assert it.figure("disk_read_bytes_total") == index.size_bytes
        await second.kill()


async def test_what_a_worker_was_still_filling_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    index = checkpoint(path)
    async with rig() as it:
        first = await it.process()
        await first.ask("hang", path=str(path), owner="m/unet")
        await it.until(lambda: any(one.checksum for one in it.memory.catalogue.segments.values()))
        await first.kill()
        await it.lost()
        await it.until(lambda: not it.memory._freeing)
        kept = it.memory.catalogue.segments.values()
        assert all(one.checksum for one in kept)
        assert 0 < held_by_the_kernel(it) == it.figure("host_used_bytes") < index.size_bytes
        second = await it.process()
        await second.ask("open", path=str(path), owner="m/unet")
        assert 0 < await second.ask("read_bytes") < index.size_bytes
        await second.kill()


async def test_damaged_memory_is_found_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    checkpoint(path)
    async with rig() as it:
        first = await it.process()
        digest = await first.ask("open", path=str(path), owner="m/unet")
        await it.until(lambda: not any(s.filler for s in it.memory.catalogue.segments.values()))
        await first.kill()
        await it.lost()
        number, descriptor = next(iter(it.memory._descriptors.items()))
        byte = os.pread(descriptor, 1, 100)
        os.pwrite(descriptor, bytes([byte[0] ^ 1]), 100)
        second = await it.process()
        assert await second.ask("open", path=str(path), owner="m/unet") == digest
        assert 0 < await second.ask("read_bytes") <= PIECE_BYTES
        assert number not in it.memory._descriptors
        await second.kill()


async def test_a_new_daemon_hands_out_what_the_old_one_left(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    checkpoint(path)
    manager = Manager(tmp_path)
    try:
        async with rig(store=manager) as it:
            worker = await it.process()
            digest = await worker.ask("open", path=str(path), owner="m/unet")
            await it.until(lambda: not any(s.filler for s in it.memory.catalogue.segments.values()))
            used = it.figure("host_used_bytes")
            await worker.kill()
        path.unlink()
        async with rig(store=manager) as it:
            assert it.figure("host_used_bytes") == held_by_the_kernel(it) == used
            worker = await it.process()
            assert await worker.ask("recall", path=str(path), owner="m/unet") == digest
            assert await worker.ask("read_bytes") == 0
            await worker.ask("close", owner="m/unet")
            await it.until(lambda: it.figure("host_used_bytes") == 0)
            assert set(manager.kept) == {"index"}
            await worker.kill()
    finally:
        manager.close()


async def test_an_opening_waits_for_memory_that_is_coming_back(tmp_path: Path) -> None:
    size = layout_of(checkpoint(tmp_path / "0.safetensors")).size_bytes
    async with rig(budget_bytes=size + 4096) as it:
        worker = await it.local()
        first = await opened(worker, checkpoint(tmp_path / "0.safetensors"), "m0/unet")
        second = await opened(worker, checkpoint(tmp_path / "1.safetensors", 1), "m1/unet")
        # The first was given back before the second was answered, not after.
        assert second.host_view() is not None
        assert first.host_bytes == 0
        first.close()
        second.close()


async def test_two_workers_map_the_same_segments_and_one_of_them_may_die(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    index = checkpoint(path)
    async with rig() as it:
        first, second = await it.process(0), await it.process(1)
        digest = await first.ask("open", path=str(path), owner="m/unet")
        await it.until(lambda: it.figure("disk_read_bytes_total") == index.size_bytes)
        once = it.figure("host_used_bytes")
        path.rename(tmp_path / "elsewhere")
        assert await second.ask("recall", path=str(path), owner="m/unet") == digest
        assert await second.ask("read_bytes") == 0
        assert it.figure("host_used_bytes") == held_by_the_kernel(it) == once
        for segment in it.memory.catalogue.segments.values():
            assert set(segment.holders) == {0, 1}
        await first.kill()
        await it.lost(0)
        again = await it.process(0)
        assert await again.ask("recall", path=str(path), owner="m/unet") == digest
        assert await again.ask("read_bytes") == 0
        # What one of them still uses stays, and goes with the last.
        await second.ask("close", owner="m/unet")
        assert it.figure("host_used_bytes") == once
        await again.ask("close", owner="m/unet")
        await it.until(lambda: it.figure("host_used_bytes") == 0)
        for worker in (second, again):
            await worker.kill()


async def test_what_two_workers_hold_is_freed_only_when_both_have_let_go(tmp_path: Path) -> None:
    async with rig() as it:
        workers = [await it.local(number) for number in (0, 1)]
        index = checkpoint(tmp_path / "m.safetensors")
        sources = [await opened(worker, index, "m/unet") for worker in workers]
        view = sources[1].host_view()
        assert view is not None
        it.budget_bytes = PIECE_BYTES
        it.now_s += 10
        it.memory.tick()
        await it.until(lambda: sources[0].host_bytes == 0)
        assert_holds(view, sources[1].layout, arrays(SIZES, 0))
        del view
        it.now_s += 10
        it.memory.tick()
        await it.until(lambda: it.figure("host_used_bytes") <= PIECE_BYTES)
        for source in sources:
            assert_right(source)
            source.close()
