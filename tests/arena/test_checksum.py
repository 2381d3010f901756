"""The checksum of a segment notices what memory and dying processes do to bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.store.arena.checksum import PAGE_BYTES, PART_BYTES, checksum_of, parts

PAGES = 6


def segment(seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(PAGES * PAGE_BYTES))


def test_equal_bytes_have_equal_checksums() -> None:
    assert checksum_of(memoryview(segment())) == checksum_of(memoryview(segment()))


@given(bit=st.integers(0, PAGES * PAGE_BYTES * 8 - 1))
def test_every_flipped_bit_shows(bit: int) -> None:
    damaged = segment()
    damaged[bit // 8] ^= 1 << bit % 8
    assert checksum_of(memoryview(damaged)) != checksum_of(memoryview(segment()))


@given(pages=st.lists(st.integers(0, PAGES - 1), min_size=2, max_size=2, unique=True))
def test_exchanged_pages_show(pages: list[int]) -> None:
    whole, damaged = segment(), segment()
    low, high = (slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES) for page in pages)
    damaged[low], damaged[high] = whole[high], whole[low]
    assert checksum_of(memoryview(damaged)) != checksum_of(memoryview(whole))


@given(kept=st.integers(0, PAGES * PAGE_BYTES - 16))
def test_a_write_that_was_torn_off_shows(kept: int) -> None:
    torn = segment()
    torn[kept:] = bytes(len(torn) - kept)
    assert checksum_of(memoryview(torn)) != checksum_of(memoryview(segment()))


@pytest.mark.parametrize("size", [0, PAGE_BYTES, PART_BYTES, PART_BYTES + PAGE_BYTES])
def test_each_part_gives_four_bytes(size: int) -> None:
    assert len(checksum_of(memoryview(bytes(size)))) == 4 * len(list(parts(size)))
