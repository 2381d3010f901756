"""Draws a forecast: what of each component stays, passes or waits, and what other budgets give."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

from offload_client import Forecast
from offload_protocol.errors import StorageFailed
from offload_protocol.sizes import format_duration, format_size

WIDTH, ROW, MARGIN, CHART = 900, 34, 20, 220
LABEL = 190
KEPT, RESIDENT, STREAMED = "#1b4965", "#62b6cb", "#f4a259"
INK, PALE = "#222222", "#dddddd"


def draw_plan(forecast: Forecast, path: Path) -> None:
    """Write the picture; raises `StorageFailed` where it cannot be written."""
    parts = forecast.components
    height = 3 * MARGIN + ROW * (len(parts) + 2) + (CHART if forecast.budgets else 0)
    image = Image.new("RGB", (WIDTH, height), "white")
    pen = ImageDraw.Draw(image)
    _bars(pen, forecast)
    if forecast.budgets:
        _curve(pen, forecast, top=2 * MARGIN + ROW * (len(parts) + 2))
    try:
        image.save(path)
    except (OSError, ValueError) as error:
        raise StorageFailed(
            f"the picture cannot be written to {path}: {error}",
            hint="name a file that ends with .png in a directory that can be written",
        ) from None


def _bars(pen: ImageDraw.ImageDraw, forecast: Forecast) -> None:
    pen.text((MARGIN, MARGIN), f"{forecast.pipeline}, {forecast.offload}", fill=INK)
    legend = ((KEPT, "always on the device"), (RESIDENT, "stays"), (STREAMED, "streamed"))
    for index, (colour, text) in enumerate(legend):
        sample = LABEL + MARGIN + 180 * index
        pen.rectangle((sample, MARGIN + ROW, sample + 12, MARGIN + ROW + 12), fill=colour)
        pen.text((sample + 18, MARGIN + ROW), text, fill=INK)
    largest = max((part.bytes for part in forecast.components), default=0) or 1
    scale = (WIDTH - LABEL - 150) / largest
    for index, part in enumerate(forecast.components):
        top = MARGIN + ROW * (index + 2)
        left = float(LABEL)
        pen.text((MARGIN, top + 8), part.name[:28], fill=INK)
        passing = max(0, part.bytes - part.kept_bytes - part.resident_bytes)
        for size, colour in (
            (part.kept_bytes, KEPT),
            (part.resident_bytes, RESIDENT),
            (passing, STREAMED),
        ):
            pen.rectangle((left, top + 4, left + size * scale, top + ROW - 8), fill=colour)
            left += size * scale
        pen.text((left + 8, top + 8), format_size(part.bytes), fill=INK)


def _curve(pen: ImageDraw.ImageDraw, forecast: Forecast, top: int) -> None:
    """Seconds of a step over the device's budget, and the budget that is worth having."""
    steps = forecast.budgets
    bottom, left, right = top + CHART - 50, LABEL, WIDTH - 60
    first, last = steps[0].budget_bytes, steps[-1].budget_bytes
    slowest = max(one.step_s for one in steps) or 1.0

    def place(budget_bytes: int, step_s: float) -> tuple[float, float]:
        share = (budget_bytes - first) / max(1, last - first)
        return left + share * (right - left), bottom - step_s / slowest * (CHART - 90)

    pen.line((left, bottom, right, bottom), fill=PALE, width=2)
    points = [place(one.budget_bytes, one.step_s) for one in steps]
    pen.line(points, fill=KEPT, width=3)
    for x, y in points:
        pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=KEPT)
    best = next(one for one in steps if one.budget_bytes == forecast.best_budget_bytes)
    x, y = place(best.budget_bytes, best.step_s)
    pen.ellipse((x - 7, y - 7, x + 7, y + 7), outline=STREAMED, width=3)
    pen.text((MARGIN, top + 10), f"{format_duration(slowest)} a step", fill=INK)
    pen.text((left, bottom + 8), format_size(first), fill=INK)
    pen.text((right - 40, bottom + 8), format_size(last), fill=INK)
    pen.text((left + 160, bottom + 26), f"best budget: {format_size(best.budget_bytes)}", fill=INK)
