"""Arguments become what the pipeline takes, and each picture has noise of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hosting.hosting_help import CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from offload_protocol.errors import InvalidRequest
from offloadd.hosting.running.arguments import MAX_PICTURES, Call, prepare_call
from offloadd.hosting.running.outputs import plain_outputs
from offloadd.hosting.sources.signatures import Parameter


def parameter(name: str, kinds: tuple[str, ...] = (), **flags: bool) -> Parameter:
    return Parameter(
        name,
        kinds,
        required=flags.get("required", False),
        wants_tensor=flags.get("wants_tensor", False),
        wants_tuple=flags.get("wants_tuple", False),
    )


PARAMETERS = {
    one.name: one
    for one in (
        parameter("prompt", ("str", "list")),
        parameter("num_images_per_prompt", ("int",)),
        parameter("latents", ("array",), wants_tensor=True),
        parameter("prompt_embeds", ("array",), wants_tensor=True),
        parameter("embeds", ("list",), wants_tensor=True),
        parameter("image", ("image", "array", "list")),
        parameter("unannotated"),
        parameter("size", ("list",), wants_tuple=True),
    )
}


def prepare(seed: int = 0, dtype: torch.dtype = torch.float32, **arguments: Any) -> Call:
    return prepare_call(arguments, PARAMETERS, seed, CPU, dtype)


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({}, 1),
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": ["a", "b"], "num_images_per_prompt": 3}, 6),
        ({"prompt_embeds": np.zeros((4, 2, 2), np.float32)}, 4),
        ({"prompt": None, "prompt_embeds": np.zeros((2, 2, 2), np.float32)}, 2),
    ],
)
def test_there_is_one_seed_for_each_picture(arguments: dict[str, Any], count: int) -> None:
    assert prepare(7, **arguments).seeds == list(range(7, 7 + count))


@settings(deadline=None)
@given(seed=st.integers(0, (1 << 64) - 1), count=st.integers(1, 5))
def test_picture_k_has_the_noise_of_seed_plus_k_alone(seed: int, count: int) -> None:
    call = prepare(seed, num_images_per_prompt=count)
    noise = call.with_noise(takes_generator=True)["generator"]
    generators = noise if isinstance(noise, list) else [noise]
    assert len(generators) == count
    for one, expected in zip(generators, call.seeds, strict=True):
        alone = prepare(expected).with_noise(takes_generator=True)["generator"]
        assert torch.equal(torch.randn(3, generator=one), torch.randn(3, generator=alone))


def test_a_single_picture_has_a_generator_that_is_not_in_a_list() -> None:
    noise = prepare(5).with_noise(takes_generator=True)["generator"]
    plain = torch.Generator("cpu").manual_seed(5)
    assert torch.equal(torch.randn(4, generator=noise), torch.randn(4, generator=plain))


def test_a_pipeline_without_a_generator_gets_none() -> None:
    assert prepare(prompt="a").with_noise(takes_generator=False) == {"prompt": "a"}


@pytest.mark.parametrize("count", [0, -1, MAX_PICTURES + 1, 1 << 60])
def test_absurd_numbers_of_pictures_are_refused(count: int) -> None:
    with pytest.raises(InvalidRequest, match=str(count)):
        prepare(num_images_per_prompt=count)


def test_an_unknown_argument_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="generator") as refused:
        prepare(generator=3)
    assert "prompt" in refused.value.hint


def test_a_missing_argument_is_named() -> None:
    needed = {"image": parameter("image", ("image",), required=True)}
    with pytest.raises(InvalidRequest, match="image"):
        prepare_call({}, needed, 0, CPU, torch.float32)


def test_arrays_become_tensors_where_the_pipeline_wants_tensors() -> None:
    array = np.arange(4, dtype=np.float64).reshape(1, 4)
    array.flags.writeable = False
    arguments = prepare(
        dtype=torch.bfloat16, latents=array, embeds=[array], image=array, unannotated=array
    ).arguments
    for tensor in (arguments["latents"], arguments["embeds"][0], arguments["unannotated"]):
        assert tensor.dtype == torch.bfloat16
        assert tensor.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert isinstance(arguments["image"], np.ndarray)
    assert arguments["image"].flags.writeable


def test_whole_numbers_keep_their_dtype() -> None:
    assert prepare(latents=np.array([1, 2])).arguments["latents"].dtype == torch.int64


def test_lists_become_tuples_only_where_tuples_are_wanted() -> None:
    arguments = prepare(size=[8, 16], unannotated=[1, [2]]).arguments
    assert arguments["size"] == (8, 16)
    assert arguments["unannotated"] == [1, [2]]


def test_outputs_are_plain_and_without_what_is_not_set() -> None:
    picture = Image.new("RGB", (2, 2))
    frames = np.empty(1, dtype=object)
    frames[0] = picture
    outputs = plain_outputs(
        {
            "images": [picture],
            "latents": torch.tensor([1.5], dtype=torch.bfloat16),
            "half": torch.tensor([1.5], dtype=torch.float16),
            "frames": frames,
            "flags": (True, None),
            "nothing": None,
        }
    )
    assert outputs["images"] == [picture]
    assert outputs["frames"] == [picture]
    assert outputs["flags"] == [True, None]
    assert outputs["latents"].dtype == np.float32
    assert outputs["half"].dtype == np.float16
    assert "nothing" not in outputs
