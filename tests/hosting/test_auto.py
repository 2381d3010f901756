"""`auto` keeps everything on the device where it fits, and streams where it does not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from offloadd.hosting.placing.auto import ACTIVATIONS_SHARE, choose_offload

GIB = 1 << 30
FLUX = {
    "transformer": 23 * GIB,
    "text_encoder_2": 9 * GIB,
    "text_encoder": GIB // 4,
    "vae": GIB // 6,
}
SIZES = st.dictionaries(st.text(min_size=1), st.integers(1, 100 * GIB), min_size=1)


def test_a_large_card_keeps_everything() -> None:
    assert choose_offload(FLUX, 80 * GIB, None, on_cpu=False).mode == "none"


def test_a_card_that_does_not_hold_everything_streams() -> None:
    assert choose_offload(FLUX, 40 * GIB, None, on_cpu=False).mode == "stream"


def test_a_budget_of_its_own_makes_a_model_stream_on_a_large_card() -> None:
    assert choose_offload(FLUX, 80 * GIB, 8 * GIB, on_cpu=False).mode == "stream"
    assert choose_offload(FLUX, 80 * GIB, 40 * GIB, on_cpu=False).mode == "none"


@settings(deadline=None)
@given(SIZES, st.integers(0, 200 * GIB), st.none() | st.integers(0, 200 * GIB))
def test_a_cpu_computes_where_the_weights_lie_unless_a_budget_is_too_small(
    sizes: dict[str, int], free_bytes: int, budget_bytes: int | None
) -> None:
    mode = choose_offload(sizes, free_bytes, budget_bytes, on_cpu=True).mode
    fits = budget_bytes is None or sum(sizes.values()) <= budget_bytes
    assert mode == ("none" if fits else "stream")


@settings(deadline=None)
@given(SIZES, st.integers(0, 200 * GIB))
def test_what_stays_on_the_device_leaves_room_for_activations(
    sizes: dict[str, int], free_bytes: int
) -> None:
    mode = choose_offload(sizes, free_bytes, None, on_cpu=False).mode
    fits = sum(sizes.values()) <= free_bytes * (1 - ACTIVATIONS_SHARE)
    assert mode == ("none" if fits else "stream")
