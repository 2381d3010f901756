"""Every mode keeps to what it may have of a device, and draws the same picture there.

The device is the simulated one, where bytes in host memory are not bytes on the device; on the CPU
what a budget leaves out is read from disk.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hosting.hosting_help import Drawn, draw, host, host_without_room, new_device_host

from offload_protocol.errors import OutOfMemory
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.hosted import HostedModel
from offloadd.offload.accelerator.simulated import Link, SimulatedAccelerator

DEVICE_BYTES = 1 << 26
LINK = Link(4e9, latency_s=1e-5, jitter_s=1e-4)
MODES: dict[str, Any] = {
    **{mode: mode for mode in ("auto", "none", "stream", "model", "sequential", "group")},
    "leaves": {"mode": "group", "offload_type": "leaf_level"},
    "blocks": {"mode": "group", "num_blocks_per_group": 2, "use_stream": True},
}


class Watched:
    """A host of the simulated device that notes how much weights took of it."""

    def __init__(self, capacity_bytes: int = DEVICE_BYTES) -> None:
        self.device = SimulatedAccelerator(capacity_bytes, LINK, Random(0))
        self.host: DeviceHost = new_device_host(self.device)
        self.most_bytes = 0

    def look(self, *_: Any) -> None:
        stats = self.host.engine.stats()
        self.most_bytes = max(self.most_bytes, stats.resident_bytes + stats.ring_bytes)

    def draw(self, model: HostedModel) -> Drawn:
        with self.device.watched():
            drawn = draw(model, on_step=self.look, at_border=self.look)
        assert self.device.hazards == []
        return drawn


@pytest.fixture(params=["sd_directory", "flux_directory"], ids=["sd", "flux"])
def directory(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def total_bytes(model: HostedModel) -> int:
    return sum(model.description.component_bytes.values())


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_draws_the_picture_of_a_plain_script_on_a_device_of_its_own_memory(
    directory: Path, references: dict[Path, Drawn], mode: str
) -> None:
    watched = Watched()
    model = host(directory, on=watched.host, offload=MODES[mode])
    for _ in range(4):
        np.testing.assert_array_equal(watched.draw(model), references[directory])
    if mode in ("auto", "none", "stream"):
        # All that a picture needs has stayed; the encoder of the autoencoder never came.
        assert model.moved_bytes == 0
        assert sum(one.streamed_bytes for one in model.components()) == 0
    else:
        assert watched.most_bytes < total_bytes(model)
        assert model.moved_bytes > 0
    assert model.unload() == []
    assert watched.host.engine.stats().resident_bytes == 0
    assert watched.device.allocated_bytes == 0


def test_model_mode_takes_no_more_than_the_largest_component(flux_directory: Path) -> None:
    watched = Watched()
    model = host(flux_directory, on=watched.host, offload="model")
    for _ in range(4):
        watched.draw(model)
    largest = max(model.description.component_bytes.values())
    assert watched.most_bytes < 1.3 * largest < 0.9 * total_bytes(model)


def test_sequential_mode_keeps_next_to_nothing(flux_directory: Path) -> None:
    watched = Watched()
    model = host(flux_directory, on=watched.host, offload="sequential")
    for _ in range(4):
        watched.draw(model)
    assert watched.most_bytes < 0.3 * total_bytes(model)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_models_budget_is_never_exceeded(
    directory: Path, references: dict[Path, Drawn], share: float
) -> None:
    watched = Watched()
    budget_bytes = int(total_bytes(host(directory)) * share)
    model = host(directory, on=watched.host, device_budget=budget_bytes)
    assert model.offload == "stream"
    for _ in range(4):
        np.testing.assert_array_equal(watched.draw(model), references[directory])
    assert 0.3 * budget_bytes < watched.most_bytes <= budget_bytes
    assert model.unload() == []


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_on_a_cpu_what_a_budget_leaves_out_is_read_from_disk(
    directory: Path, references: dict[Path, Drawn], share: float
) -> None:
    whole = host(directory)
    budget_bytes = int(total_bytes(whole) * share)
    model = host(directory, device_budget=budget_bytes)
    for _ in range(3):
        np.testing.assert_array_equal(draw(model), references[directory])
    assert model.offload == "stream"
    assert model.resident_bytes <= budget_bytes
    assert model.moved_bytes > 0
    assert model.unload() == []
    assert whole.unload() == []


def test_on_a_cpu_what_the_store_has_no_room_for_is_not_held_outside_it(
    directory: Path, references: dict[Path, Drawn]
) -> None:
    model = host(directory, on=host_without_room(), offload="none")
    for _ in range(3):
        np.testing.assert_array_equal(draw(model), references[directory])
    assert model.resident_bytes < 0.6 * total_bytes(model)
    assert model.moved_bytes > 0
    assert sum(one.host_bytes for one in model.components()) == 0
    assert model.unload() == []


def test_a_budget_holds_for_a_model_that_keeps_nothing(flux_directory: Path) -> None:
    with pytest.raises(OutOfMemory) as refused:
        host(flux_directory, offload="sequential", device_budget=1000)
    smallest = refused.value.details["minimum_budget_bytes"]
    model = host(flux_directory, offload="sequential", device_budget=smallest)
    assert model.unload() == []


def test_a_budget_that_cannot_work_names_the_smallest_that_does(
    flux_directory: Path, references: dict[Path, Drawn]
) -> None:
    with pytest.raises(OutOfMemory, match="smallest that works") as refused:
        host(flux_directory, device_budget=1000)
    smallest = refused.value.details["minimum_budget_bytes"]
    with pytest.raises(OutOfMemory):
        host(flux_directory, device_budget=smallest - 1)
    model = host(flux_directory, device_budget=smallest)
    np.testing.assert_array_equal(draw(model), references[flux_directory])
    assert model.unload() == []


def test_a_model_that_is_to_stay_whole_is_refused_a_smaller_budget(flux_directory: Path) -> None:
    with pytest.raises(OutOfMemory, match="stay on the device whole") as refused:
        host(flux_directory, offload="none", device_budget="1KiB")
    assert "stream" in refused.value.hint


def test_models_whose_plans_do_not_fit_together_give_way_to_each_other(
    sd_directory: Path, flux_directory: Path, references: dict[Path, Drawn]
) -> None:
    sizes = [total_bytes(host(one)) for one in (sd_directory, flux_directory)]
    # Room for the larger one, for activations' reserve, and not for both.
    watched = Watched(int(1.15 * max(sizes) / 0.75))
    models = {
        one: host(one, on=watched.host, offload="stream") for one in (sd_directory, flux_directory)
    }
    for _ in range(3):
        for one, model in models.items():
            for _ in range(2):
                np.testing.assert_array_equal(watched.draw(model), references[one])
            assert model.resident_bytes > 0.6 * total_bytes(model)
    assert watched.most_bytes <= watched.host.engine.budget_bytes
    assert all(model.unload() == [] for model in models.values())


def test_every_out_of_memory_error_of_the_engine_shows_the_plan(flux_directory: Path) -> None:
    with pytest.raises(OutOfMemory) as refused:
        host(flux_directory, on=Watched(20_000).host, offload="stream")
    assert refused.value.details["minimum_budget_bytes"] > 20_000
    assert "for the largest group" in refused.value.message
