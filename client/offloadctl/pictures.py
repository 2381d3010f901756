"""Writes the pictures of a result to files or to standard output."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offload_protocol.errors import StorageFailed
from offloadctl.arguments import FORMATS, STANDARD_OUTPUT
from offloadctl.output import write

if TYPE_CHECKING:
    from PIL import Image


def file_names(file: str, count: int) -> list[str]:
    """One name for each picture: `a.png`, or `a-1.png`, `a-2.png` where there are several."""
    if count == 1:
        return [file]
    path = Path(file)
    return [
        str(path.with_name(f"{path.stem}-{number}{path.suffix}")) for number in range(1, count + 1)
    ]


def write_pictures(images: Sequence[Image.Image], file: str) -> list[str]:
    """Write all pictures, replacing what is there; returns the names of the files.

    Standard output gets the first as PNG. Raises `StorageFailed`.
    """
    if file == STANDARD_OUTPUT:
        buffer = io.BytesIO()
        images[0].save(buffer, "PNG")
        write(buffer.getvalue())
        return []
    names = file_names(file, len(images))
    for image, name in zip(images, names, strict=True):
        kind = FORMATS[Path(name).suffix.lower()]
        writable = image.convert("RGB") if kind in ("JPEG", "PPM") else image
        try:
            writable.save(name, kind)
        except OSError as error:
            raise StorageFailed(
                f"the picture cannot be written to {name}: {error.strerror or error}",
                hint="the job is done; its seed makes the picture again",
            ) from error
    return names
