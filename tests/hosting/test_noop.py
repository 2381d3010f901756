"""The empty model: what it gives, and that it can be stopped as any other."""

from __future__ import annotations

import pytest

from offload_protocol.errors import Cancelled, InvalidRequest
from offloadd.channel.specs import ModelSpec
from offloadd.hosting.noop import SOURCE, NoopModel
from offloadd.hosting.running.arguments import Call


@pytest.fixture
def model() -> NoopModel:
    return NoopModel(ModelSpec(name="noop", source=SOURCE))


def run(model: NoopModel, **arguments: object) -> dict[str, object]:
    return model.run(Call(arguments, [0]), lambda step, steps: None, lambda: None)


def test_it_gives_as_many_zeros_as_it_is_asked_for(model: NoopModel) -> None:
    zeros = run(model, size_bytes=3)["zeros"]
    assert bytes(zeros) == b"\0\0\0"  # type: ignore[call-overload]
    assert run(model, prompt="anything") == {}


@pytest.mark.parametrize("size_bytes", [-1, (512 << 20) + 1])
def test_it_gives_no_more_than_a_frame_may_hold(model: NoopModel, size_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match="size_bytes"):
        run(model, size_bytes=size_bytes)


def test_it_has_a_border_at_which_a_cancel_stops_it(model: NoopModel) -> None:
    def stop() -> None:
        raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        model.run(Call({}, [0]), lambda step, steps: None, stop)


def test_it_describes_what_its_call_takes(model: NoopModel) -> None:
    described = model.message()
    assert {one.name: one.kinds for one in described.parameters} == {
        "prompt": ["str"],
        "size_bytes": ["int"],
    }
