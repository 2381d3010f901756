"""`auto` takes the fastest mode that fits, and never one that does not fit while another does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from offloadd.hosting.auto import ACTIVATIONS_SHARE, choose_offload

GIB = 1 << 30
FLUX = {
    "transformer": 23 * GIB,
    "text_encoder_2": 9 * GIB,
    "text_encoder": GIB // 4,
    "vae": GIB // 6,
}
SIZES = st.dictionaries(st.text(min_size=1), st.integers(1, 100 * GIB), min_size=1)


def test_a_large_card_keeps_everything() -> None:
    assert choose_offload(FLUX, 80 * GIB, 64 * GIB, on_cpu=False).mode == "none"


def test_a_card_that_holds_the_largest_component_takes_one_at_a_time() -> None:
    assert choose_offload(FLUX, 40 * GIB, 64 * GIB, on_cpu=False).mode == "model"


def test_a_small_card_streams_layers_when_the_host_has_room() -> None:
    chosen = choose_offload(FLUX, 12 * GIB, 128 * GIB, on_cpu=False)
    assert (chosen.mode, chosen.offload_type, chosen.use_stream) == ("group", "leaf_level", True)


def test_a_small_card_and_a_small_host_do_without_streams() -> None:
    chosen = choose_offload(FLUX, 12 * GIB, 48 * GIB, on_cpu=False)
    assert (chosen.mode, chosen.use_stream) == ("group", None)


@settings(deadline=None)
@given(SIZES, st.integers(0, 200 * GIB), st.integers(0, 200 * GIB))
def test_a_cpu_computes_where_the_weights_lie(
    sizes: dict[str, int], device: int, host: int
) -> None:
    assert choose_offload(sizes, device, host, on_cpu=True).mode == "none"


@settings(deadline=None)
@given(SIZES, st.integers(0, 200 * GIB))
def test_what_stays_on_the_device_leaves_room_for_activations(
    sizes: dict[str, int], free: int
) -> None:
    mode = choose_offload(sizes, free, 0, on_cpu=False).mode
    held = {"none": sum(sizes.values()), "model": max(sizes.values()), "group": 0}[mode]
    assert held <= free * (1 - ACTIVATIONS_SHARE)
    if sum(sizes.values()) <= free * (1 - ACTIVATIONS_SHARE):
        assert mode == "none"
