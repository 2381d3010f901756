"""Arguments are judged by what the hosted pipeline takes, before anything is queued."""

from __future__ import annotations

from typing import Any

import pytest

from offload_protocol.errors import InvalidRequest, OffloadError, TooLarge
from offloadd.channel.messages import ModelDescribed, ParameterInfo
from offloadd.control.jobs.arguments import Bounds, check_arguments

BOUNDS = Bounds(max_steps=100, max_pixels=64 * 64, max_images=4, max_frames=9)
DESCRIBED = ModelDescribed(
    name="m",
    pipeline="SomePipeline",
    dtype="float32",
    offload="none",
    components=[],
    parameters=[
        ParameterInfo(name="prompt", kinds=["str", "list"], required=True, items=["str"]),
        ParameterInfo(name="num_inference_steps", kinds=["int"]),
        ParameterInfo(name="guidance_scale", kinds=["float"]),
        ParameterInfo(name="height", kinds=["int", "none"]),
        ParameterInfo(name="width", kinds=["int", "none"]),
        ParameterInfo(name="num_images_per_prompt", kinds=["int", "none"]),
        ParameterInfo(name="num_frames", kinds=["int"]),
        ParameterInfo(name="sigmas", kinds=["list"], items=["float"]),
        ParameterInfo(name="image", kinds=["image", "array"]),
        ParameterInfo(name="anything"),
    ],
    size_multiple=8,
)
IMAGE = {"$image": 0, "mode": "RGB", "size": [8, 8]}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"prompt": ["one", "two"]},
        {"num_inference_steps": 1},
        {"num_inference_steps": 100},
        {"guidance_scale": 7},
        {"guidance_scale": -1.5},
        {"height": 64, "width": 64},
        {"height": None},
        {"width": 512},
        {"num_images_per_prompt": 4},
        {"image": IMAGE},
        {"image": {"$array": 0, "dtype": "uint8", "shape": [1]}},
        {"anything": {"deep": [1, None, "x"]}},
        {"sigmas": [1.0, 0.5]},
        {"sigmas": [1, 0.5]},
    ],
)
def test_fitting_arguments_pass(arguments: dict[str, Any]) -> None:
    check_arguments({"prompt": "x", **arguments}, DESCRIBED, BOUNDS)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"promt": "x"}, InvalidRequest, "no argument 'promt' .*did you mean 'prompt'"),
        ({"zzz": 1}, InvalidRequest, "no argument 'zzz' .*it takes prompt, "),
        ({"callback_on_step_end": "print"}, InvalidRequest, "no code is taken"),
        ({"generator": 3}, InvalidRequest, "give the request a seed"),
        ({"prompt": 3}, InvalidRequest, "'prompt' is of kind int: 3 .*takes str or list"),
        ({"prompt": None}, InvalidRequest, "'prompt' is of kind none"),
        ({"num_inference_steps": True}, InvalidRequest, "of kind bool"),
        ({"num_inference_steps": 2.0}, InvalidRequest, "of kind float"),
        ({"num_inference_steps": "9" * 500}, InvalidRequest, r"of kind str: '9{56}\.\.\."),
        ({"image": "file.png"}, InvalidRequest, "of kind str: 'file.png' .*image or array"),
        ({"guidance_scale": float("nan")}, InvalidRequest, "'guidance_scale' holds nan"),
        ({"anything": [{"a": float("inf")}]}, InvalidRequest, r"'anything\[0\].a' holds inf"),
        ({"num_inference_steps": -1}, InvalidRequest, "is -1 .*it takes 1 to 100"),
        ({"num_inference_steps": 0}, InvalidRequest, "is 0 "),
        ({"num_inference_steps": 1 << 60}, InvalidRequest, "limits.max_steps"),
        ({"sigmas": []}, InvalidRequest, "has 0 entries"),
        ({"sigmas": [0.1] * 101}, InvalidRequest, "has 101 entries"),
        ({"height": 63}, InvalidRequest, "'height' is 63, .*multiple of 8 .*use 64"),
        ({"width": 0}, InvalidRequest, "'width' is 0, .*use 8"),
        ({"width": -64}, InvalidRequest, "'width' is -64, .*use 8"),
        ({"height": 72, "width": 64}, TooLarge, "64 × 72 has 4608 pixels, the limit is 4096"),
        ({"height": 1 << 50}, TooLarge, "pixels, the limit is 4096"),
        ({"num_images_per_prompt": 5}, InvalidRequest, "is 5 .*1 to 4"),
        ({"num_images_per_prompt": 0}, InvalidRequest, "is 0 .*1 to 4"),
        ({"num_frames": 10}, InvalidRequest, "is 10 .*1 to 9"),
        ({"prompt": []}, InvalidRequest, "empty list"),
        ({"prompt": [["a"]]}, InvalidRequest, "item 0 of the argument 'prompt' is of kind list"),
        ({"prompt": ["a", None]}, InvalidRequest, "item 1 .* is of kind none: None .*takes str"),
        ({"sigmas": [0.1, "x"]}, InvalidRequest, "item 1 of the argument 'sigmas'"),
        ({"prompt": ["x"] * 5}, TooLarge, "5 pictures, the limit is 4"),
        ({"prompt": ["x", "y"], "num_images_per_prompt": 3}, TooLarge, "6 pictures"),
    ],
)
def test_unfitting_arguments_are_refused_with_what_would_do(
    arguments: dict[str, Any], error: type[OffloadError], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_arguments({"prompt": "x", **arguments}, DESCRIBED, BOUNDS)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"'prompt' is missing .*SomePipeline cannot run"):
        check_arguments({}, DESCRIBED, BOUNDS)
