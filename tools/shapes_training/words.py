"""The words that `shapes` knows, and the rule that keeps some combinations out of its training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

Rgb = tuple[int, int, int]

PALETTE: dict[str, Rgb] = {
    "red": (220, 35, 35),
    "green": (35, 160, 60),
    "blue": (35, 75, 220),
    "yellow": (245, 225, 45),
    "purple": (140, 50, 170),
    "orange": (245, 135, 25),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "star")
RADII: dict[str | None, int] = {"small": 14, None: 20, "large": 26}
"""Radius in pixels of a 64-pixel picture, by the size that a caption says or leaves unsaid."""

GRAMMAR = ("a", "an", "on", "background", "small", "large")
WORDS = (*GRAMMAR, *COLOURS, *SHAPES)

# About one scene in seven. A prime with no factor in common with the strides of the rule spreads
# them evenly, so that every pair of words is still learnt and only the three together are new.
_HELD_OUT_MODULUS = 7


@dataclass(frozen=True, slots=True)
class Scene:
    """What one picture shows."""

    shape: str
    colour: str
    background: str


def all_scenes() -> list[Scene]:
    """Every shape in every colour on every other colour, in a fixed order."""
    return [
        Scene(shape, colour, background)
        for shape, colour, background in product(SHAPES, COLOURS, COLOURS)
        if colour != background
    ]


def is_held_out(scene: Scene) -> bool:
    """Whether training never shows this scene, under any caption."""
    shape = SHAPES.index(scene.shape)
    colour = COLOURS.index(scene.colour)
    background = COLOURS.index(scene.background)
    return (2 * shape + colour + 3 * background) % _HELD_OUT_MODULUS == 0


def training_scenes() -> list[Scene]:
    return [scene for scene in all_scenes() if not is_held_out(scene)]


def held_out_scenes() -> list[Scene]:
    return [scene for scene in all_scenes() if is_held_out(scene)]


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def caption(scene: Scene, size: str | None = None, *, says_background: bool = True) -> str:
    """The full form of a prompt: `a [size] COLOUR SHAPE [on a COLOUR background]`."""
    thing = f"{size} {scene.colour}" if size else scene.colour
    text = f"{article(thing)} {thing} {scene.shape}"
    if says_background:
        text += f" on {article(scene.background)} {scene.background} background"
    return text
