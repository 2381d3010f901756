"""What is said of a model before it is loaded, against what loading it then does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hosting.hosting_help import draw, host, new_device_host

from offload_protocol.errors import InvalidRequest, ModelLoadFailed, OutOfMemory
from offload_protocol.records import Forecast
from offloadd.channel.checked_specs import model_spec
from offloadd.channel.forecasts import ForecastOrder
from offloadd.hosting.planning.forecast import forecast
from offloadd.offload.accelerator.simulated import Link, SimulatedAccelerator

DEVICE_BYTES = 1 << 26


@pytest.fixture(params=["sd_directory", "flux_directory"], ids=["sd", "flux"])
def directory(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def foretold(directory: Path, *, on_cpu: bool = True, **options: Any) -> Forecast:
    keys = ("host_budget_bytes", "link_bytes_per_s", "compute_s")
    measured = {key: options.pop(key) for key in keys if key in options}
    return forecast(
        ForecastOrder(
            spec=model_spec("plan", str(directory), options),
            on_cpu=on_cpu,
            device_bytes=DEVICE_BYTES,
            free_bytes=DEVICE_BYTES,
            **measured,
        )
    )


@pytest.mark.parametrize(
    "feature",
    [
        {"attention_backend": "sage_hub"},
        {"attention_backend": "native"},
        {"tiling": True},
        {"channels_last": True},
        {"slicing": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_a_feature_is_refused_by_the_plan_where_loading_refuses_it(
    flux_directory: Path, component: str, feature: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"components": {component: feature}}

    def told(ask: Callable[..., Any]) -> str:
        try:
            ask(flux_directory, **options)
        except InvalidRequest as refused:
            return refused.message.partition(": ")[2]
        return "works"

    assert told(foretold) == told(host)


@pytest.mark.parametrize("share", [None, 0.5, 0.8])
@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "link"])
def test_memory_is_foretold_within_5_percent_of_what_loading_takes(
    directory: Path, on_cpu: bool, share: float | None
) -> None:
    whole = foretold(directory, on_cpu=on_cpu)
    options: dict[str, Any] = {}
    if share is not None:
        weights = sum(part.bytes for part in whole.components)
        options["device_budget"] = int(share * weights)
    told = foretold(directory, on_cpu=on_cpu, **options)
    device = SimulatedAccelerator(DEVICE_BYTES, Link(4e9), Random(0))
    on = None if on_cpu else new_device_host(device)
    model = host(directory, on=on, **options)
    for _ in range(6):
        draw(model)
    parts = {part.name: part for part in model.components()}
    held_bytes = sum(part.host_bytes for part in parts.values())
    assert told.host_bytes == pytest.approx(held_bytes, rel=0.05)
    assert told.offload == model.offload, "auto means the same before and after loading"
    if on is not None:
        stats = on.engine.stats()
        taken_bytes = stats.resident_bytes + stats.ring_bytes
        # Where everything fits, what a picture does not need (an encoder of images) never comes.
        unused_bytes = sum(
            part.bytes - parts[part.name].resident_bytes
            for part in told.components
            if not told.device_budget_bytes
        )
        assert told.device_bytes == pytest.approx(taken_bytes + unused_bytes, rel=0.05)
        for row in told.components if share else ():
            assert row.bytes == pytest.approx(parts[row.name].bytes, rel=0.05)
    assert model.unload() == []


def test_the_link_that_was_measured_and_the_compute_give_the_seconds(flux_directory: Path) -> None:
    weights = sum(part.bytes for part in foretold(flux_directory).components)
    budget: dict[str, Any] = {"device_budget": weights // 3}
    slow = foretold(flux_directory, link_bytes_per_s=1e6, **budget)
    fast = foretold(flux_directory, link_bytes_per_s=2e6, **budget)
    assert slow.link_is_measured
    assert not foretold(flux_directory, **budget).link_is_measured
    [slow_part] = [part for part in slow.components if part.name == "transformer"]
    [fast_part] = [part for part in fast.components if part.name == "transformer"]
    assert slow_part.streamed_bytes == fast_part.streamed_bytes > 0
    assert slow_part.step_s == pytest.approx(2 * fast_part.step_s, rel=0.05)
    bound = foretold(
        flux_directory, link_bytes_per_s=1e12, compute_s={"transformer": 3.0}, **budget
    )
    [bound_part] = [part for part in bound.components if part.name == "transformer"]
    assert bound_part.step_s == pytest.approx(3.0, rel=0.01)


def test_more_budget_is_never_slower_and_the_best_is_the_least_that_is_as_fast(
    flux_directory: Path,
) -> None:
    told = foretold(flux_directory, on_cpu=False, link_bytes_per_s=1e9)
    steps = told.budgets
    assert steps[0].budget_bytes == told.minimum_budget_bytes
    assert steps[0].streamed_bytes > 0
    assert steps[-1].streamed_bytes == 0
    for less, more in pairwise(steps):
        assert more.step_s <= less.step_s * 1.01
    assert told.best_budget_bytes in [step.budget_bytes for step in steps]


def test_the_smallest_budget_is_the_one_that_loading_accepts(flux_directory: Path) -> None:
    smallest = foretold(flux_directory, on_cpu=False).minimum_budget_bytes
    device = SimulatedAccelerator(DEVICE_BYTES, Link(4e9), Random(0))
    model = host(flux_directory, on=new_device_host(device), device_budget=smallest)
    assert model.unload() == []
    with pytest.raises(OutOfMemory, match="smallest that works"):
        foretold(flux_directory, on_cpu=False, device_budget=smallest - 1)


def test_what_the_host_has_no_room_for_is_not_counted_there(flux_directory: Path) -> None:
    whole = foretold(flux_directory).host_bytes
    told = foretold(flux_directory, host_budget_bytes=whole // 2)
    assert told.host_bytes <= whole // 2
    assert {part.host_bytes == 0 for part in told.components} == {True, False}


def test_a_source_or_a_setting_that_loading_refuses_is_refused(
    tmp_path: Path, flux_directory: Path
) -> None:
    with pytest.raises(ModelLoadFailed):
        foretold(tmp_path)
    with pytest.raises(InvalidRequest, match="no component"):
        foretold(flux_directory, components={"unet": "stream"})
