"""Names a silhouette by its geometry alone, whatever its place, size and turn."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Points = npt.NDArray[np.float64]

# A crumb beside the shape or a pinhole in it is the decoder's noise; more is another shape.
_CRUMBS = 0.02
_FEWEST_PIXELS = 40

_UNIT_AREAS = {
    "circle": math.pi,
    "square": 4 * 0.85**2,
    "triangle": 3 * math.sqrt(3) / 4,
    "star": 5 * 0.45 * math.sin(math.pi / 5),
}


def area_of(shape: str) -> float:
    """The area of a shape drawn with radius 1."""
    return _UNIT_AREAS[shape]


def name_of(mask: Mask) -> str | None:
    """Circle, square, triangle or star; None for anything else.

    `fold` is 0 for a disc; a perfect triangle has 0.66 for 3 repeats, a square 0.43 for 4, a star
    0.81 for 5. Each limit lies about half-way to the nearest polygon that is to be refused: a
    trapezoid and a three-pointed star, a rectangle, a pentagon, a hexagon for the circle.
    """
    solid = solidity(mask)
    two, three, four, five, six = (fold(mask, times) for times in (2, 3, 4, 5, 6))
    if solid < 0.77 and five > 0.56 and max(two, three, four) < 0.4:
        return "star"
    if solid > 0.82 and three > 0.52 and two < 0.2:
        return "triangle"
    if solid > 0.84 and four > 0.25 and three < 0.2 and two < 0.14:
        return "square"
    if solid > 0.88 and max(two, three, four, five, six) < 0.12:
        return "circle"
    return None


def whole_piece(mask: Mask) -> Mask | None:
    """The silhouette without crumbs and pinholes; None if it is not one piece inside the frame."""
    piece = _connected(mask, _seed(mask)) if mask.any() else mask
    area = np.count_nonzero(piece)
    if area < _FEWEST_PIXELS or np.count_nonzero(mask) - area > _CRUMBS * area:
        return None
    if piece[0].any() or piece[-1].any() or piece[:, 0].any() or piece[:, -1].any():
        return None
    outside = np.zeros_like(mask)
    outside[0, 0] = True
    filled = ~_connected(~piece, outside)
    return None if np.count_nonzero(filled) - area > _CRUMBS * area else filled


def _seed(mask: Mask) -> Mask:
    """One pixel of the mask: the one nearest to its centre, which is in the largest piece."""
    rows, columns = np.nonzero(mask)
    nearest = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
    seed = np.zeros_like(mask)
    seed[rows[nearest], columns[nearest]] = True
    return seed


def _connected(mask: Mask, seed: Mask) -> Mask:
    """What can be reached from the seed within the mask, stepping to the four neighbours."""
    reached = seed & mask
    while True:
        grown = reached.copy()
        grown[1:] |= reached[:-1]
        grown[:-1] |= reached[1:]
        grown[:, 1:] |= reached[:, :-1]
        grown[:, :-1] |= reached[:, 1:]
        grown &= mask
        if np.array_equal(grown, reached):
            return reached
        reached = grown


def fold(mask: Mask, times: int) -> float:
    """How far the silhouette repeats `times` times in one turn about its centre, from 0 to 1."""
    rows, columns = np.nonzero(mask)
    spokes = (columns - columns.mean()) + 1j * (rows - rows.mean())
    return float(abs(np.sum(spokes**times)) / np.sum(np.abs(spokes) ** times))


def solidity(mask: Mask) -> float:
    """The part of its convex hull that the silhouette fills."""
    rows, columns = np.nonzero(mask)
    # The hull goes around whole pixels, hence their corners.
    corners = [(0, 0), (0, 1), (1, 0), (1, 1)]
    points = np.concatenate([np.stack([columns + x, rows + y], axis=1) for x, y in corners])
    return float(np.count_nonzero(mask) / _polygon_area(_hull(points.astype(np.float64))))


def _hull(points: Points) -> Points:
    ordered = sorted({(float(x), float(y)) for x, y in points})
    lower, upper = _chain(ordered), _chain(ordered[::-1])
    return np.array(lower[:-1] + upper[:-1])


def _chain(ordered: list[tuple[float, float]]) -> list[tuple[float, float]]:
    chain: list[tuple[float, float]] = []
    for point in ordered:
        while len(chain) > 1 and _turn(chain[-2], chain[-1], point) <= 0:
            chain.pop()
        chain.append(point)
    return chain


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _polygon_area(corners: Points) -> float:
    x, y = corners[:, 0], corners[:, 1]
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)
