"""Rough pictures: what they are made of, and that a call computes the same with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offloadd.hosting.running.previews import MAX_SIDE, rough_picture, showing, shows_latents


def test_a_picture_is_dark_where_latents_are_low_and_bright_where_they_are_high() -> None:
    latents = torch.zeros(2, 4, 8, 6)
    latents[0, :, :, 3:] = 5.0
    latents[1] = 99.0
    picture = rough_picture(latents)
    assert picture is not None
    assert picture.shape == (8, 6)
    assert (picture[:, :3] == 0).all()
    assert (picture[:, 3:] == 255).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_middle_frame_of_a_video_is_shown_whatever_its_numbers_are(dtype: torch.dtype) -> None:
    latents = torch.zeros(1, 16, 5, 4, 4, dtype=dtype)
    latents[:, :, 2, 0, 0] = 1.0
    picture = rough_picture(latents)
    assert picture is not None
    assert picture[0, 0] == 255
    assert picture.sum() == 255


def test_large_latents_are_thinned_out() -> None:
    picture = rough_picture(torch.rand(1, 4, 3 * MAX_SIDE, 40))
    assert picture is not None
    assert picture.shape == (MAX_SIDE, 14)


@pytest.mark.parametrize("shape", [(1, 100, 64), (64,), (1, 4, 0, 8), ()])
def test_what_is_laid_out_otherwise_gives_none(shape: tuple[int, ...]) -> None:
    assert rough_picture(torch.zeros(shape)) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_numbers_that_say_nothing_still_give_a_picture(value: float) -> None:
    picture = rough_picture(torch.full((1, 4, 2, 2), value))
    assert picture is not None
    assert picture.dtype == np.uint8


def test_latents_are_shown_and_handed_back_as_they_are() -> None:
    class Pipeline:
        def __call__(self, callback_on_step_end: object = None) -> None: ...

    class Silent:
        def __call__(self) -> None: ...

    assert shows_latents(Pipeline)
    assert not shows_latents(Silent)
    seen: list[torch.Tensor] = []
    callback = showing(seen.append)["callback_on_step_end"]
    held = {"latents": torch.ones(1)}
    assert callback(None, 0, 0, held) is held
    assert callback(None, 0, 0, {}) == {}
    assert seen[0] is held["latents"]
    assert len(seen) == 1
