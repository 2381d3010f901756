"""Loading leaves the device to others while it reads, and stops within one piece when cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hosting.hosting_help import Drawn, draw, host
from hosting.tiny_pipelines import save_sd

from offload_protocol.errors import Cancelled
from offloadd.channel.checked_specs import model_spec
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.loading import skeletons
from offloadd.hosting.sources.describe import describe
from offloadd.offload.accelerator.cpu import CpuAccelerator
from offloadd.store.arena.client import ArenaClient
from offloadd.store.open_file import OpenFile
from offloadd.store.read_plan import Segment
from offloadd.store.reader import DiskReader
from offloadd.worker.baton import Baton

PATIENCE_S = 60.0


class StoppedDisk(DiskReader):
    """Reads only once `go_on` is set; every read is counted when it is asked for."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.go_on = threading.Event()
        self.asked = 0

    def read(
        self, files: Sequence[OpenFile], segments: Sequence[Segment], into: memoryview, **how: Any
    ) -> Future[int]:
        self.asked += 1
        assert self.go_on.wait(PATIENCE_S)
        return super().read(files, segments, into, **how)


class Loading:
    """A load in a thread that has the device but for where it says that it does without."""

    def __init__(self, directory: Path, cache: Path) -> None:
        self.disk = StoppedDisk()
        self.has_device = True
        self.is_cancelled = False
        self.error: BaseException | None = None
        self.model: HostedModel | None = None
        self.arena = ArenaClient.alone(self.disk)
        host = DeviceHost(CpuAccelerator(), cache, self.arena, self.disk, self._without_device)
        description = describe(model_spec("m", str(directory), {}), on_cpu=True)
        plan = description.plan(1 << 40, 1 << 40, on_cpu=True)

        def run() -> None:
            try:
                self.model = HostedModel.load(description, plan, host, self._watch)
            except Cancelled as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def is_reading_without_device(self) -> bool:
        return self.disk.asked > 0 and not self.has_device

    def _watch(self, done: int, total: int) -> None:
        if self.is_cancelled:
            raise Cancelled("cancelled by the test")

    @contextmanager
    def _without_device(self) -> Iterator[None]:
        self.has_device = False
        try:
            yield
        finally:
            self.has_device = True


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[Loading]:
    loading = Loading(save_sd(tmp_path / "m"), tmp_path / "packs")
    yield loading
    loading.disk.go_on.set()
    loading.thread.join()
    if loading.model is not None:
        assert loading.model.unload() == []
    loading.arena.close()
    loading.disk.close()


def wait_until_it_reads(loading: Loading) -> None:
    deadline = time.monotonic() + PATIENCE_S
    steady = 0
    while steady < 20:
        # It passes through such moments while it builds; once all is built, it stays so.
        steady = steady + 1 if loading.is_reading_without_device() else 0
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_case_31_while_the_disk_is_slow_jobs_have_the_device(loading: Loading) -> None:
    wait_until_it_reads(loading)
    assert loading.thread.is_alive()
    loading.disk.go_on.set()
    loading.thread.join(PATIENCE_S)
    assert loading.model is not None
    assert loading.has_device


def test_jobs_go_on_stepping_while_a_class_of_its_own_loading_is_loaded(
    sd_directory: Path,
    references: dict[Path, Drawn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Classes of the libraries stand in for such a one: their own from_pretrained has to be used.
    monkeypatch.setattr(skeletons, "loads_in_its_own_way", lambda kind: True)
    running = host(sd_directory)
    baton = Baton()
    disk = DiskReader(threads=1)
    arena = ArenaClient.alone(disk)
    other = DeviceHost(CpuAccelerator(), tmp_path, arena, disk, baton.released)
    loaded: list[HostedModel] = []

    def load() -> None:
        with baton.held():
            loaded.append(host(sd_directory, on=other))

    loading = threading.Thread(target=load)
    borders_beside_loader = 0

    def at_border() -> None:
        nonlocal borders_beside_loader
        baton.lend()
        children = psutil.Process().children()
        borders_beside_loader += any(_is_loader(child) for child in children)

    loading.start()
    while loading.is_alive():
        with baton.held():
            draw(running, at_border=at_border)
    loading.join()
    assert borders_beside_loader >= 20, "a loader takes seconds to start, a step milliseconds"
    for model in (running, loaded.pop()):
        np.testing.assert_array_equal(draw(model), references[sd_directory])
        assert model.unload() == []
    arena.close()
    disk.close()


def _is_loader(process: psutil.Process) -> bool:
    try:
        return any("pack_writer" in word for word in process.cmdline())
    except psutil.Error:
        return False


def test_case_31_a_cancelled_load_reads_no_further_and_leaves_nothing(loading: Loading) -> None:
    wait_until_it_reads(loading)
    asked = loading.disk.asked
    loading.is_cancelled = True
    loading.disk.go_on.set()
    loading.thread.join(PATIENCE_S)
    assert isinstance(loading.error, Cancelled)
    assert loading.disk.asked <= asked + 1
    assert loading.arena._holdings.extents == {}
