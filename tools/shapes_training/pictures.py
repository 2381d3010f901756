"""Draws the training pictures: one coloured shape on a coloured background, with a caption."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw

from shapes_training.words import PALETTE, RADII, Scene, caption, training_scenes

SIDE = 64
_OVERSAMPLING = 4
_JITTER = 4.0
_STAR_WAIST = 0.45
# A square as wide as the circle of its size would look larger than it.
_SQUARE_HALF_SIDE = 0.85

_UNSAID_BACKGROUND = 0.15
_BARE_WORDS = 0.15


@dataclass(frozen=True, slots=True)
class Example:
    """One picture, as bytes of shape (64, 64, 3), and the words for it."""

    pixels: npt.NDArray[np.uint8]
    caption: str


def outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """The corners of a shape that has corners."""
    if shape == "square":
        half = radius * _SQUARE_HALF_SIDE
        left, top, right, bottom = x - half, y - half, x + half, y + half
        return [(left, top), (right, top), (right, bottom), (left, bottom)]
    if shape == "triangle":
        return [_on_circle(x, y, radius, turn / 3) for turn in range(3)]
    radii = (radius, radius * _STAR_WAIST)
    return [_on_circle(x, y, radii[corner % 2], corner / 10) for corner in range(10)]


def _on_circle(x: float, y: float, radius: float, turn: float) -> tuple[float, float]:
    angle = 2 * math.pi * turn - math.pi / 2
    return x + radius * math.cos(angle), y + radius * math.sin(angle)


def draw(scene: Scene, size: str | None, offset: tuple[float, float]) -> npt.NDArray[np.uint8]:
    image = Image.new("RGB", (SIDE * _OVERSAMPLING,) * 2, PALETTE[scene.background])
    canvas = ImageDraw.Draw(image)
    x, y = ((SIDE / 2 + shift) * _OVERSAMPLING for shift in offset)
    radius = RADII[size] * _OVERSAMPLING
    colour = PALETTE[scene.colour]
    if scene.shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    else:
        canvas.polygon(outline(scene.shape, x, y, radius), fill=colour)
    return np.asarray(image.reduce(_OVERSAMPLING))


def random_example(source: random.Random, scenes: list[Scene]) -> Example:
    scene = source.choice(scenes)
    size = source.choice(list(RADII))
    offset = (source.uniform(-_JITTER, _JITTER), source.uniform(-_JITTER, _JITTER))
    text = caption(scene, size, says_background=source.random() >= _UNSAID_BACKGROUND)
    if source.random() < _BARE_WORDS:
        text = without_frame(text)
    return Example(draw(scene, size, offset), text)


def without_frame(text: str) -> str:
    """The short form that people type: `red circle on white`."""
    return " ".join(word for word in text.split() if word not in ("a", "an", "background"))


def random_examples(count: int, seed: int) -> list[Example]:
    source = random.Random(seed)
    scenes = training_scenes()
    return [random_example(source, scenes) for _ in range(count)]


def as_tensor(examples: list[Example]) -> torch.Tensor:
    """Pictures as the VAE takes them: (count, 3, 64, 64) between -1 and 1."""
    stacked = torch.from_numpy(np.stack([example.pixels for example in examples]))
    return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1
