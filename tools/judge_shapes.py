"""Judges a picture of `shapes`: does it show what its prompt asked for? Knows nothing of the model.

    python tools/judge_shapes.py --prompt "a red circle on a white background" FILE.png

Exit 0: it fits. 1: it does not, and the reasons are printed. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from shapes_training.words import COLOURS, PALETTE, RADII, SHAPES
from silhouettes import area_of, name_of, whole_piece

Pixels = npt.NDArray[np.float64]
Picture = Image.Image | npt.NDArray[np.uint8]

# Half of the way between the two nearest palette colours is 46; a shade may differ by a little more
# where no other colour is near.
_FARTHEST_SHADE = 60.0
_FAINTEST_SHAPE = 45.0
_MOST_CLUTTER = 0.03
_SAID_SIDE = 64
# Half-way between the radii that small, unsaid and large are drawn with.
_SMALL_BELOW = (RADII["small"] + RADII[None]) / 2
_LARGE_ABOVE = (RADII["large"] + RADII[None]) / 2


@dataclass(frozen=True, slots=True)
class Expected:
    """What a prompt asks for; None where it leaves the choice open."""

    shape: str
    colour: str | None
    background: str | None
    size: str | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a picture shows; None where that is unclear."""

    shape: str | None
    colour: str | None
    background: str | None
    size: str | None
    is_clean: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    fits: bool
    reasons: tuple[str, ...]


def parse_prompt(prompt: str) -> Expected:
    """Understands `[a] [small|large] [COLOUR] SHAPE [on [a] COLOUR [background]]`."""
    words = re.findall(r"[a-z]+", prompt.lower())
    split = words.index("on") if "on" in words else len(words)
    thing, ground = words[:split], words[split:]
    shape = _only(thing, SHAPES)
    if shape is None:
        raise ValueError(f"The prompt names no shape; say one of {', '.join(SHAPES)}.")
    sizes = tuple(size for size in RADII if size)
    return Expected(shape, _only(thing, COLOURS), _only(ground, COLOURS), _only(thing, sizes))


def _only(words: list[str], known: tuple[str, ...]) -> str | None:
    found = [word for word in words if word in known]
    if len(found) > 1:
        raise ValueError(f"The prompt asks for several things at once: {', '.join(found)}.")
    return found[0] if found else None


def judge(picture: Picture, expected: Expected) -> Verdict:
    seen = look(picture)
    reasons = [
        f"the {what} should be {wanted}, and is {found or 'unclear'}"
        for what, wanted, found in (
            ("shape", expected.shape, seen.shape),
            ("colour", expected.colour, seen.colour),
            ("background", expected.background, seen.background),
            ("size", expected.size, seen.size),
        )
        if wanted is not None and wanted != found
    ]
    if not seen.is_clean:
        reasons.append("there are stray colours beside shape and background")
    return Verdict(not reasons, tuple(reasons))


def look(picture: Picture) -> Seen:
    pixels = np.asarray(picture, dtype=np.float64)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError("The picture has to be RGB: height, width, 3.")
    ground = _border_colour(pixels)
    ink = _ink_colour(pixels, ground)
    if float(np.linalg.norm(ink - ground)) < _FAINTEST_SHAPE:
        return Seen(None, None, _colour_name(ground), None, is_clean=True)
    share, stray = _mixture(pixels, ground, ink)
    mask = share > 0.5
    piece = whole_piece(mask)
    shape = None if piece is None else name_of(piece)
    size = None if shape is None else _size_name(shape, mask)
    is_clean = float(np.mean(stray > _FARTHEST_SHADE)) < _MOST_CLUTTER
    return Seen(shape, _colour_name(ink), _colour_name(ground), size, is_clean)


def _border_colour(pixels: Pixels) -> Pixels:
    edges = [pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]]
    colour: Pixels = np.median(np.concatenate([edge.reshape(-1, 3) for edge in edges]), axis=0)
    return colour


def _ink_colour(pixels: Pixels, ground: Pixels) -> Pixels:
    flat = pixels.reshape(-1, 3)
    distance = np.linalg.norm(flat - ground, axis=1)
    # Even a small star covers 6 % of the picture, so the farthest 2 % are surely inside the shape.
    far = distance >= 0.8 * np.percentile(distance, 98)
    colour: Pixels = np.median(flat[far], axis=0)
    return colour


def _mixture(pixels: Pixels, ground: Pixels, ink: Pixels) -> tuple[Pixels, Pixels]:
    """How much ink each pixel has, and how far it is from any mixture of ink and ground."""
    way = ink - ground
    share: Pixels = np.clip((pixels - ground) @ way / (way @ way), 0, 1)
    stray: Pixels = np.linalg.norm(pixels - ground - share[..., None] * way, axis=-1)
    return share, stray


def _colour_name(colour: Pixels) -> str | None:
    distances = {name: float(np.linalg.norm(colour - rgb)) for name, rgb in PALETTE.items()}
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] < _FARTHEST_SHADE else None


def _size_name(shape: str, mask: npt.NDArray[np.bool_]) -> str:
    scale = _SAID_SIDE / min(mask.shape)
    radius = scale * float(np.sqrt(np.count_nonzero(mask) / area_of(shape)))
    if radius < _SMALL_BELOW:
        return "small"
    return "large" if radius > _LARGE_ABOVE else "medium"


def main() -> int:
    parser = argparse.ArgumentParser(description="Judge whether a picture fits its prompt.")
    parser.add_argument("--prompt", required=True, help="what the picture was asked to show")
    parser.add_argument("file", type=Path, metavar="FILE", help="the picture")
    arguments = parser.parse_args()
    try:
        expected = parse_prompt(arguments.prompt)
        picture = Image.open(arguments.file).convert("RGB")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    verdict = judge(picture, expected)
    print("fits" if verdict.fits else "does not fit: " + "; ".join(verdict.reasons))
    return 0 if verdict.fits else 1


if __name__ == "__main__":
    sys.exit(main())
