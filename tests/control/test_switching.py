"""What a switch costs follows from what has to move to which device."""

from __future__ import annotations

import pytest

from offload_protocol.records import ComponentInfo
from offloadd.channel.messages import DeviceReport, ModelDescribed, ModelLoaded
from offloadd.channel.specs import ModelSpec
from offloadd.control.models.models import ModelTable
from offloadd.control.scheduling.switching import FIRST_GUESS_BYTES_PER_S, LINK_BYTES_PER_S, Costs

GB = 10**9


def table(*loaded: str) -> ModelTable:
    """Two models of 6 GB."""
    specs = [ModelSpec(name=name, source=f"/{name}") for name in "ab"]
    models = ModelTable(specs, lambda order: None, lambda: 0.0)
    parts = [ComponentInfo(name="unet", bytes=6 * GB)]
    for name in "ab":
        models.described(
            ModelDescribed(
                name=name, pipeline="P", dtype="", offload="", components=parts, parameters=[]
            )
        )
    for name in loaded:
        models.loaded(ModelLoaded(name=name, offload="", components=parts, loading_s=1.0))
    return models


def device(name: str, total_bytes: int) -> DeviceReport:
    return DeviceReport(device=name, name="", total_bytes=total_bytes, free_bytes=0)


@pytest.mark.parametrize(
    ("loaded", "report", "switch_s"),
    [
        ("", device("cuda:0", 24 * GB), 6 * GB / FIRST_GUESS_BYTES_PER_S),
        ("b", device("cuda:0", 24 * GB), 0.0),
        ("ab", device("cuda:0", 24 * GB), 0.0),
        ("ab", device("cuda:0", 8 * GB), 6 * GB / LINK_BYTES_PER_S),
        ("ab", device("cuda:0", 4 * GB), 4 * GB / LINK_BYTES_PER_S),
        ("ab", device("cpu", 4 * GB), 0.0),
        ("ab", None, 0.0),
    ],
)
def test_only_what_has_to_move_costs(
    loaded: str, report: DeviceReport | None, switch_s: float
) -> None:
    costs = Costs(table(*loaded), lambda: report)
    assert costs.switch_s("b") == pytest.approx(switch_s)


def test_the_bandwidth_of_loading_is_learned_from_loads_that_are_large_enough() -> None:
    costs = Costs(table(), lambda: None)
    costs.note_load(1000, 1.0)
    assert costs.switch_s("b") == pytest.approx(6 * GB / FIRST_GUESS_BYTES_PER_S)
    for _ in range(50):
        costs.note_load(3 * GB, 1.0)
    assert costs.switch_s("b") == pytest.approx(2.0, rel=0.01)
    assert costs.switch_s("never heard of") == 0.0
