"""Sizes and durations: read as people write them, shown as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_protocol.errors import InvalidRequest
from offload_protocol.sizes import (
    format_duration,
    format_size,
    parse_duration_s,
    parse_size_bytes,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        (17, 17),
        ("1024", 1024),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        ("80%", 800),
        ("0.5%", 5),
    ],
)
def test_sizes_are_read(text: str | int, size_bytes: int) -> None:
    assert parse_size_bytes(text, whole_bytes=1000) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", -1, "1 pound", "1e9", "101%", "٣", "1.GiB", "nan"]
)
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(InvalidRequest):
        parse_size_bytes(text, whole_bytes=1000)


@pytest.mark.parametrize("text", ["9999999999GiB", f"{'9' * 400}GiB", 1 << 63, 10**400])
def test_a_size_that_fits_no_message_is_refused(text: str | int) -> None:
    with pytest.raises(InvalidRequest, match=r"more than 8388608\.0 TiB"):
        parse_size_bytes(text)


def test_a_duration_that_never_ends_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no finite duration"):
        parse_duration_s("9" * 400)


def test_a_percentage_needs_a_whole() -> None:
    with pytest.raises(InvalidRequest, match="'80%' is not a size"):
        parse_size_bytes("80%")


@given(st.integers(0, 1 << 50))
def test_a_shown_size_is_near_the_size(size_bytes: int) -> None:
    shown = format_size(size_bytes).replace(" ", "")
    assert parse_size_bytes(shown) == pytest.approx(size_bytes, rel=0.06, abs=1)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("250ms", 0.25), ("30s", 30), ("5m", 300), ("1.5h", 5400), ("2d", 172_800), (7, 7), ("3", 3)],
)
def test_durations_are_read(text: str | float, duration_s: float) -> None:
    assert parse_duration_s(text) == pytest.approx(duration_s)


@pytest.mark.parametrize("text", ["", "s", "-1s", -1, -0.5, math.nan, math.inf, "5y", "1m30s"])
def test_what_is_no_duration_is_refused(text: str | float) -> None:
    with pytest.raises(InvalidRequest):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("duration_s", "shown"),
    [(0.08, "80 ms"), (4.2, "4.2 s"), (200, "3m 20s"), (7500, "2h 05m"), (59.97, "60.0 s")],
)
def test_durations_are_shown(duration_s: float, shown: str) -> None:
    assert format_duration(duration_s) == shown
