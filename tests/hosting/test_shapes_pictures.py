"""The judge of pictures is right about perfect drawings, and says no to everything else."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageDraw

from judge_shapes import Expected, judge, look, parse_prompt
from shapes_training.words import COLOURS, PALETTE, SHAPES

Points = list[tuple[float, float]]


def pointed(points: int, waist: float) -> Points:
    """A star with its first point up, whose inner corners are at `waist` from its middle."""
    reach = [(1.0, waist)[corner % 2] for corner in range(2 * points)]
    turns = [math.pi * corner / points for corner in range(2 * points)]
    return [(r * math.sin(turn), -r * math.cos(turn)) for r, turn in zip(reach, turns, strict=True)]


CORNERS = {
    "square": [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)],
    "triangle": [(0.0, -1.0), (0.87, 0.5), (-0.87, 0.5)],
    "star": pointed(5, 0.45),
}
PENTAGON_ANGLES = [2 * math.pi * corner / 5 for corner in range(5)]
HEXAGON_ANGLES = [2 * math.pi * corner / 6 for corner in range(6)]
CROSS = [(-0.3, -1.0), (0.3, -1.0), (0.3, -0.3), (1.0, -0.3), (1.0, 0.3), (0.3, 0.3)]
CROSS += [(-x, -y) for x, y in CROSS]


def picture(
    shape: str,
    colour: str = "red",
    background: str = "white",
    *,
    radius: float = 20,
    turn_degrees: float = 0,
    side: int = 64,
) -> Image.Image:
    image = Image.new("RGB", (side * 4, side * 4), PALETTE[background])
    canvas = ImageDraw.Draw(image)
    if shape == "circle":
        canvas.circle((side * 2, side * 2), radius * 4, fill=PALETTE[colour])
    else:
        polygon(canvas, CORNERS[shape], radius * side / 16, turn_degrees, PALETTE[colour])
    return image.resize((side, side), Image.Resampling.BOX)


def polygon(
    canvas: ImageDraw.ImageDraw,
    corners: Points,
    scale: float,
    turn_degrees: float,
    fill: tuple[int, int, int],
) -> None:
    middle = canvas.im.size[0] / 2
    cosine, sine = math.cos(math.radians(turn_degrees)), math.sin(math.radians(turn_degrees))
    turned = [
        (middle + scale * (x * cosine - y * sine), middle + scale * (x * sine + y * cosine))
        for x, y in corners
    ]
    canvas.polygon(turned, fill=fill)


def drawn(corners: Points, scale: float = 80) -> Image.Image:
    image = Image.new("RGB", (256, 256), PALETTE["white"])
    polygon(ImageDraw.Draw(image), corners, scale, 0, PALETTE["red"])
    return image.resize((64, 64), Image.Resampling.BOX)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [14, 20, 26])
def test_names_every_shape_at_every_size(shape: str, radius: float) -> None:
    assert look(picture(shape, radius=radius * (0.85 if shape == "square" else 1))).shape == shape


@pytest.mark.parametrize("shape", ["square", "triangle", "star"])
@pytest.mark.parametrize("turn_degrees", [10, 33, 45])
def test_names_a_turned_shape(shape: str, turn_degrees: float) -> None:
    assert look(picture(shape, turn_degrees=turn_degrees)).shape == shape


def test_names_every_pair_of_colours() -> None:
    pairs = [(ink, ground) for ink in COLOURS for ground in COLOURS if ink != ground]
    seen = [look(picture("star", ink, ground)) for ink, ground in pairs]
    assert [(each.colour, each.background) for each in seen] == pairs


def test_names_the_size() -> None:
    sizes = [look(picture("circle", radius=radius)).size for radius in (14, 20, 26)]
    assert sizes == ["small", "medium", "large"]


@pytest.mark.parametrize("side", [64, 128])
def test_takes_arrays_of_any_size(side: int) -> None:
    pixels = np.asarray(picture("triangle", side=side))
    assert judge(pixels, parse_prompt("a red triangle on a white background")).fits


@pytest.mark.parametrize("wanted", SHAPES)
@pytest.mark.parametrize("shown", SHAPES)
def test_accepts_only_the_shape_that_was_asked_for(wanted: str, shown: str) -> None:
    verdict = judge(picture(shown), Expected(wanted, "red", "white", None))
    assert verdict.fits == (wanted == shown)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a red square on a white background", "the shape should be square, and is circle"),
        ("a blue circle on a white background", "the colour should be blue, and is red"),
        ("a red circle on a black background", "the background should be black, and is white"),
        ("a small red circle on a white background", "the size should be small, and is medium"),
    ],
)
def test_says_what_is_wrong(prompt: str, reason: str) -> None:
    verdict = judge(picture("circle"), parse_prompt(prompt))
    assert not verdict.fits
    assert verdict.reasons == (reason,)


def test_an_empty_picture_shows_no_shape() -> None:
    seen = look(Image.new("RGB", (64, 64), PALETTE["blue"]))
    assert (seen.shape, seen.colour, seen.background) == (None, None, "blue")


def test_noise_fits_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert not any(judge(noise, Expected(shape, None, None, None)).fits for shape in SHAPES)


@pytest.mark.parametrize(
    "corners",
    [
        pytest.param([(-1, -0.5), (1, -0.5), (1, 0.5), (-1, 0.5)], id="rectangle"),
        pytest.param([(-1, -1), (1, -1), (-1, 1)], id="half_square"),
        pytest.param([(math.sin(n), math.cos(n)) for n in PENTAGON_ANGLES], id="pentagon"),
        pytest.param([(math.sin(n), math.cos(n)) for n in HEXAGON_ANGLES], id="hexagon"),
        pytest.param(CROSS, id="cross"),
        pytest.param([(-0.5, -0.6), (0.5, -0.6), (1, 0.6), (-1, 0.6)], id="trapezoid"),
        pytest.param([(-1, -0.75), (1, -0.75), (1, 0.75), (-1, 0.75)], id="short_rectangle"),
        pytest.param(pointed(3, 0.35), id="three_pointed_star"),
        pytest.param(pointed(4, 0.45), id="four_pointed_star"),
        pytest.param(pointed(6, 0.5), id="six_pointed_star"),
    ],
)
def test_other_polygons_are_none_of_the_shapes(corners: Points) -> None:
    assert look(drawn(corners)).shape is None


def test_an_ellipse_is_no_circle() -> None:
    squashed = picture("circle").resize((64, 40))
    image = Image.new("RGB", (64, 64), PALETTE["white"])
    image.paste(squashed, (0, 12))
    assert look(image).shape is None


def _with_disc(image: Image.Image, x: int, y: int, radius: int, colour: str) -> Image.Image:
    ImageDraw.Draw(image).circle((x, y), radius, fill=PALETTE[colour])
    return image


def test_a_ring_is_no_circle() -> None:
    assert look(_with_disc(picture("circle"), 32, 32, 8, "white")).shape is None


def test_two_shapes_are_not_one() -> None:
    assert look(_with_disc(picture("circle", radius=14), 10, 10, 5, "red")).shape is None


def test_a_shape_cut_by_the_edge_is_not_whole() -> None:
    assert look(picture("circle", radius=34)).shape is None


def test_a_blot_of_a_third_colour_does_not_fit() -> None:
    verdict = judge(
        _with_disc(picture("square"), 32, 32, 8, "green"),
        parse_prompt("a red square on a white background"),
    )
    assert not verdict.fits


def test_a_shade_between_two_colours_has_no_name() -> None:
    grey: npt.NDArray[np.uint8] = np.full((64, 64, 3), 128, dtype=np.uint8)
    assert look(grey).background is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a red circle on a white background", Expected("circle", "red", "white", None)),
        ("A small Orange star on black.", Expected("star", "orange", "black", "small")),
        ("blue square", Expected("square", "blue", None, None)),
        ("a triangle", Expected("triangle", None, None, None)),
    ],
)
def test_reads_prompts(prompt: str, expected: Expected) -> None:
    assert parse_prompt(prompt) == expected


@pytest.mark.parametrize("prompt", ["a red house", "", "a red circle and a square"])
def test_refuses_prompts_it_cannot_judge(prompt: str) -> None:
    with pytest.raises(ValueError, match="The prompt"):
        parse_prompt(prompt)


@pytest.mark.parametrize(("colour", "code"), [("red", 0), ("blue", 1)])
def test_the_command_answers_with_its_exit_code(tmp_path: Path, colour: str, code: int) -> None:
    file = tmp_path / "picture.png"
    picture("circle").save(file)
    script = Path(__file__).parents[2] / "tools" / "judge_shapes.py"
    prompt = f"a {colour} circle on a white background"
    done = subprocess.run([sys.executable, script, "--prompt", prompt, file], check=False)
    assert done.returncode == code
