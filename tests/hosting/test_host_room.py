"""Models whose memory others want rest, come back, and draw the same pictures all the while."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from arena.rig import Rig, rig
from hosting.hosting_help import Drawn, draw, host, plain_script
from hosting.tiny_pipelines import save_sd

from offload_protocol.errors import StorageFailed
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.hosted import HostedModel
from offloadd.offload.accelerator.cpu import CpuAccelerator


class Worker:
    """Hosts models in one arena, and lets them rest when their memory is wanted."""

    def __init__(self, it: Rig, device_host: DeviceHost) -> None:
        self.rig = it
        self._host = device_host
        self._models: dict[str, HostedModel] = {}
        self.busy: set[str] = set()
        self._loop = asyncio.get_running_loop()
        device_host.arena.tell_wanted(self._wanted)

    async def load(self, directory: Path) -> HostedModel:
        model = await asyncio.to_thread(host, directory, on=self._host)
        self._models[model.description.spec.name] = model
        return model

    async def draw(self, model: HostedModel) -> Drawn:
        """As a job does: what rests is brought back first."""
        self.rig.now_s += 1
        if model.needs_gathering:
            await asyncio.to_thread(model.gather, lambda done, total: None)
        return await asyncio.to_thread(draw, model)

    async def shrink(self, budget_bytes: int) -> None:
        self.rig.budget_bytes = budget_bytes
        self.rig.now_s += 10
        self.rig.memory.tick()
        await self.rig.until(lambda: self.rig.figure("host_used_bytes") <= budget_bytes)

    async def unload(self, models: Iterable[HostedModel]) -> None:
        for model in models:
            assert await asyncio.to_thread(model.unload) == []

    def _wanted(self, owners: frozenset[str]) -> None:
        self._loop.call_soon_threadsafe(self._rest, owners)

    def _rest(self, owners: frozenset[str]) -> None:
        for name in {owner.rpartition("/")[0] for owner in owners}:
            if name in self.busy:
                self._host.arena.refuse([one for one in owners if one.startswith(f"{name}/")])
            elif name in self._models:
                self._models[name].rest()


@asynccontextmanager
async def a_worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with rig() as it:
        local = await it.local()
        yield Worker(
            it, DeviceHost(CpuAccelerator(), tmp_path / "packs", local.arena, local.reader)
        )


async def test_the_idle_model_gives_way_and_comes_back(tmp_path: Path) -> None:
    first_directory, second_directory = (
        save_sd(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 60))
    )
    async with a_worker(tmp_path) as worker:
        first = await worker.load(first_directory)
        size_bytes = worker.rig.figure("host_used_bytes")
        worker.rig.budget_bytes = int(1.5 * size_bytes)
        second = await worker.load(second_directory)
        assert worker.rig.figure("host_used_bytes") <= worker.rig.budget_bytes
        assert first.needs_gathering
        for model, directory in 2 * [(second, second_directory), (first, first_directory)]:
            np.testing.assert_array_equal(await worker.draw(model), plain_script(directory))
            assert not model.needs_gathering
            assert model.moved_bytes == 0
            assert worker.rig.figure("host_used_bytes") <= worker.rig.budget_bytes
        await worker.unload((first, second))


async def test_a_pinned_model_stays_and_the_other_is_read_from_disk(tmp_path: Path) -> None:
    first_directory, second_directory = (
        save_sd(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 60))
    )
    async with a_worker(tmp_path) as worker:
        first = await worker.load(first_directory)
        worker.rig.pinned_models.add(first.description.spec.name)
        worker.rig.budget_bytes = int(1.5 * worker.rig.figure("host_used_bytes"))
        second = await worker.load(second_directory)
        for _ in range(2):
            np.testing.assert_array_equal(await worker.draw(second), plain_script(second_directory))
            assert second.moved_bytes > 0
            assert not first.needs_gathering
            assert worker.rig.figure("host_used_bytes") <= worker.rig.budget_bytes
        await worker.unload((first, second))


async def test_with_a_third_of_the_memory_pictures_are_right_and_with_all_again_fast(
    tmp_path: Path,
) -> None:
    directory = save_sd(tmp_path / "a")
    expected = plain_script(directory)
    async with a_worker(tmp_path) as worker:
        model = await worker.load(directory)
        np.testing.assert_array_equal(await worker.draw(model), expected)
        size_bytes = worker.rig.figure("host_used_bytes")
        for share in (0.6, 0.3):
            await worker.shrink(int(share * size_bytes))
            np.testing.assert_array_equal(await worker.draw(model), expected)
            assert model.moved_bytes > 0
            assert worker.rig.figure("host_used_bytes") <= share * size_bytes
        worker.rig.budget_bytes = 2 * size_bytes
        np.testing.assert_array_equal(await worker.draw(model), expected)
        assert model.moved_bytes == 0
        await worker.unload([model])


async def test_a_model_in_use_keeps_its_memory_until_it_is_idle(tmp_path: Path) -> None:
    directory = save_sd(tmp_path / "a")
    async with a_worker(tmp_path) as worker:
        model = await worker.load(directory)
        name, size_bytes = model.description.spec.name, worker.rig.figure("host_used_bytes")
        worker.busy.add(name)
        worker.rig.budget_bytes = size_bytes // 3
        worker.rig.now_s += 10
        worker.rig.memory.tick()
        segments = worker.rig.memory.catalogue.segments
        await worker.rig.until(lambda: all(one.is_kept for one in segments.values()))
        assert worker.rig.figure("host_used_bytes") == size_bytes
        np.testing.assert_array_equal(await worker.draw(model), plain_script(directory))
        worker.busy.clear()
        await worker.shrink(size_bytes // 3)
        await worker.unload([model])


async def test_case_15_files_cut_short_under_a_model_fail_its_job_and_no_other(
    tmp_path: Path,
) -> None:
    directory, other_directory = (
        save_sd(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 60))
    )
    async with a_worker(tmp_path) as worker:
        model, other = await worker.load(directory), await worker.load(other_directory)
        worker.rig.pinned_models.add(other.description.spec.name)
        await worker.shrink(int(0.6 * worker.rig.figure("host_used_bytes")))
        os.truncate(directory / "unet" / "diffusion_pytorch_model.safetensors", 10_000)
        with pytest.raises(StorageFailed, match="unet"):
            await worker.draw(model)
        np.testing.assert_array_equal(await worker.draw(other), plain_script(other_directory))
        await worker.unload((model, other))
