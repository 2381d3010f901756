"""Reads what the command line says into values; wrong usage ends before any work begins."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

STANDARD_OUTPUT = "-"

FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".ppm": "PPM",
}
"""Picture formats by the suffix of the file."""

_SIZE = re.compile(r"(\d{1,6})x(\d{1,6})", re.ASCII | re.IGNORECASE)


def parse_picture_size(text: str) -> tuple[int, int]:
    """Width and height in pixels from `640x480`; raises `BadParameter`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a size, write it as 640x480", param_hint="--size"
        )
    return int(match[1]), int(match[2])


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """A map from `KEY=VALUE` texts; a value that is JSON is read as such, any other is a text.

    Dots in a key make maps within maps, as in TOML. Raises `BadParameter`.
    """
    result: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not all(key.split(".")):
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint=option)
        *tables, last = key.split(".")
        inner = result
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise typer.BadParameter(f"{key!r} is within a plain value", param_hint=option)
        if last in inner:
            raise typer.BadParameter(f"{key!r} is given twice", param_hint=option)
        inner[last] = _value(text)
    return result


def pipeline_arguments(
    pairs: Sequence[str], steps: int | None, size: str | None, reserved: object
) -> dict[str, Any]:
    """Keyword arguments of the pipeline from `--arg`, `--steps` and `--size`.

    `reserved` is the function whose own parameters cannot be meant. Raises `BadParameter`.
    """
    arguments = parse_pairs(pairs, "--arg")
    shorthands: dict[str, Any] = {}
    if steps is not None:
        shorthands["num_inference_steps"] = steps
    if size is not None:
        shorthands["width"], shorthands["height"] = parse_picture_size(size)
    own = set(inspect.signature(reserved).parameters)  # type: ignore[arg-type]
    for name in arguments:
        if name in shorthands or name in own:
            raise typer.BadParameter(
                f"{name!r} has an option of its own or is given twice", param_hint="--arg"
            )
    return arguments | shorthands


def parse_adapters(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The adapters of a request from `NAME` or `NAME:WEIGHT`; raises `BadParameter`."""
    chosen: list[dict[str, Any]] = []
    for text in texts:
        name, colon, number = text.partition(":")
        try:
            weight = float(number) if colon else 1.0
        except ValueError:
            weight = math.nan
        if not name or not math.isfinite(weight):
            raise typer.BadParameter(f"{text!r} is not NAME or NAME:WEIGHT", param_hint="--adapter")
        chosen.append({"name": name, "weight": weight})
    return chosen


def parse_keep_alive(text: str | None) -> float | None:
    """Seconds from `5m`, `0` or `forever`, the last as -1; raises `BadParameter`."""
    return -1.0 if text == "forever" else parse_duration(text, "--keep-alive")


def parse_duration(text: str | None, option: str) -> float | None:
    """Seconds from `90s` or `5m`; raises `BadParameter` that names the option."""
    if text is None:
        return None
    from offload_protocol.errors import InvalidRequest
    from offload_protocol.sizes import parse_duration_s

    try:
        return parse_duration_s(text)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def check_output(file: str, *, as_json: bool, stdout_is_terminal: bool) -> None:
    """Raise `BadParameter` where a picture could not be written to `file` after all the work."""
    if file == STANDARD_OUTPUT:
        if as_json:
            raise typer.BadParameter(
                "the picture and --json cannot share the output", param_hint="-o"
            )
        if stdout_is_terminal:
            raise typer.BadParameter("will not write a picture to a terminal", param_hint="-o")
        return
    path = Path(file)
    if path.suffix.lower() not in FORMATS:
        known = " ".join(FORMATS)
        raise typer.BadParameter(f"the suffix of {file!r} is none of {known}", param_hint="-o")
    if path.is_dir():
        raise typer.BadParameter(f"{file!r} is a directory", param_hint="-o")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {str(path.parent)!r}", param_hint="-o")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"no permission to write {file!r}", param_hint="-o")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
