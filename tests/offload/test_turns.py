"""What the ring is for components that take turns."""

from __future__ import annotations

from collections.abc import Sequence

from offloadd.offload.streaming.streamed import StreamedComponent
from offloadd.offload.streaming.turns import Turns, common_ring_bytes, is_wanted_sooner


def _component(ring_bytes: int) -> StreamedComponent:
    return StreamedComponent((), ring_bytes)


def _rings(parts: Sequence[StreamedComponent], order: Sequence[int]) -> list[int]:
    """The ring at the beginning of each step."""
    turns = Turns()
    rings = []
    for index in order:
        turns.step(parts[index])
        rings.append(common_ring_bytes(parts[index], parts, 1 << 20, 256))
    return rings


def test_a_pipeline_has_one_ring_after_its_first_request() -> None:
    encoder, denoiser, decoder = parts = [_component(512), _component(2048), _component(256)]
    request = [0, *[1] * 20, 2]
    rings = _rings(parts, request * 3)
    assert set(rings[len(request) :: len(request)]) == {2048}
    assert set(rings[2 * len(request) + 2 :]) == {2048}
    assert (encoder.turn_steps, denoiser.turn_steps, decoder.turn_steps) == (1, 20, 1)


def test_parts_that_alternate_share_the_larger_ring() -> None:
    rings = _rings([_component(512), _component(1024)], [0, 1] * 10)
    assert set(rings[4:]) == {1024}


def test_a_model_that_fits_has_no_ring_once_it_runs_long() -> None:
    rings = _rings([_component(0), _component(1024)], ([0] * 8 + [1] * 8) * 2)
    assert rings[-16:] == [0] * 8 + [1024] * 8


def test_the_next_turn_of_a_pipeline_comes_before_that_of_another_model() -> None:
    turns = Turns()
    other, encoder, denoiser = _component(0), _component(0), _component(0)
    for part in (other, encoder, denoiser, encoder):
        turns.step(part)
    assert is_wanted_sooner(denoiser, encoder, runs=True)
    assert not is_wanted_sooner(other, encoder, runs=True)
    turns.step(denoiser)
    turns.step(denoiser)
    assert not is_wanted_sooner(encoder, denoiser, runs=True), "it runs on and on"
