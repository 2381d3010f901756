"""The adapters of a request are judged before it is queued, and keep the device to its job."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
from control.plane import Plane

from offload_protocol import codec
from offload_protocol.errors import InvalidRequest
from offload_protocol.messages import AdapterChoice, Submit
from offloadd.channel.checked_specs import model_spec
from offloadd.channel.messages import RunJob
from offloadd.config_files import describe, load_config
from offloadd.control.jobs.adapters import check_adapters
from offloadd.control.jobs.jobs import fingerprint

SPEC = model_spec(
    "m",
    "/models/m",
    {
        "adapters": [
            {"name": "ink", "source": "/a/ink.safetensors"},
            {"name": "oil", "source": "/o"},
        ]
    },
)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ([AdapterChoice(name="inc")], "no adapter 'inc' .*did you mean 'ink'. it has ink, oil"),
        ([AdapterChoice(name="")], "it has ink, oil"),
        ([AdapterChoice(name="ink"), AdapterChoice(name="ink")], "'ink' is named twice"),
        ([AdapterChoice(name="ink", weight=math.nan)], "weight of the adapter 'ink' is nan"),
        ([AdapterChoice(name="ink", weight=-math.inf)], "'ink' is -inf .*finite"),
    ],
)
def test_adapters_that_the_model_does_not_have_are_refused(
    chosen: list[AdapterChoice], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_adapters(chosen, SPEC)


def test_a_model_without_adapters_says_who_registers_them() -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_adapters([AdapterChoice(name="ink")], model_spec("m", "/models/m", {}))
    assert "administrator" in raised.value.hint
    assert raised.value.details == {"known": []}


def test_adapters_are_part_of_a_requests_fingerprint_and_of_its_message() -> None:
    plain = Submit(rid=1, job="a", model="m")
    ink = Submit(rid=1, job="a", model="m", adapters=[AdapterChoice(name="ink")])
    more = Submit(rid=1, job="a", model="m", adapters=[AdapterChoice(name="ink", weight=0.5)])
    assert len({fingerprint(one, ()).digest for one in (plain, ink, more)}) == 3
    assert codec.convert(codec.plain(more), Submit) == more


def test_a_jobs_adapters_go_along_with_it_and_unknown_ones_are_refused() -> None:
    plane = Plane(SPEC, max_sweep=4)
    plane.work()
    plane.submit("dressed", adapters=[AdapterChoice(name="ink", weight=0.5)])
    plane.submit("plain")
    ordered = [one for one in plane.orders if isinstance(one, RunJob)]
    assert [one.adapters for one in ordered][:1] == [[AdapterChoice(name="ink", weight=0.5)]]
    with pytest.raises(InvalidRequest):
        plane.submit("other", adapters=[AdapterChoice(name="wax")])


def test_adapters_are_read_from_the_configuration_and_shown_as_they_were_given(
    tmp_path: Path,
) -> None:
    text = """
[[models]]
name = "m"
source = "/models/m"

[[models.adapters]]
name = "ink"
source = "/a/ink.safetensors"

[[models.adapters]]
name = "oil"
source = "/o"
"""
    file = tmp_path / "offloadd.toml"
    file.write_text(text)
    config = load_config(file, {})
    assert SPEC in config.models
    shown = tomllib.loads("\n".join(describe(config)))["models"]
    assert tomllib.loads(text)["models"][0] in shown
