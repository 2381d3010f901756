"""Arguments and outputs as plain data plus frames: arrays and images travel outside the body.

An array becomes `{"$array": FRAME, "dtype": NAME, "shape": [...]}`, an image
`{"$image": FRAME, "mode": MODE, "size": [WIDTH, HEIGHT]}`; FRAME counts the frames behind the body
from 0. Array frames are C-ordered little-endian numbers, image frames are raw rows of pixels: no
compressed format is decoded on either side, so no decoder can be attacked or made to expand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from offload_protocol.errors import InvalidRequest, TooLarge
from offload_protocol.limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

Frame = bytes | memoryview

ARRAY_DTYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
"""Bytes per element of the dtypes that may travel."""

IMAGE_MODES = {"L": 1, "RGB": 3, "RGBA": 4}
"""Bytes per pixel of the image modes that may travel."""

MAX_INTEGER = (1 << 64) - 1
MIN_INTEGER = -(1 << 63)


def pack(value: Any, frames: list[Frame], limits: Limits = DEFAULT_LIMITS) -> Any:
    """Plain data for `value`; its arrays and images are appended to `frames`.

    Takes None, bool, int (64 bit), float, str, lists, tuples, maps with str keys, numpy arrays and
    scalars, and PIL images. Raises `InvalidRequest` for anything else, `TooLarge` over a limit.
    """
    return _pack(value, frames, limits, depth=0, place="value")


def unpack(data: Any, frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> Any:
    """The inverse of `pack`; arrays are read-only views of their frames.

    Raises `InvalidRequest` for a reference that does not fit its frame, `TooLarge` over a limit.
    """
    return _unpack(data, frames, limits, depth=0, place="value")


def check(data: Any, frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> None:
    """Raise what `unpack` would raise, without building an array or an image.

    So the control plane can refuse a request at once and needs neither numpy nor Pillow.
    """
    _check(data, frames, limits, depth=0, place="value")


def _check(data: Any, frames: Sequence[Frame], limits: Limits, depth: int, place: str) -> None:
    if data is None or isinstance(data, bool):
        return
    if isinstance(data, (int, float, str)):
        _checked_scalar(data, limits, place)
    elif isinstance(data, list):
        _check_depth(depth, limits, place)
        for index, item in enumerate(data):
            _check(item, frames, limits, depth + 1, f"{place}[{index}]")
    elif isinstance(data, dict):
        _check_depth(depth, limits, place)
        if "$array" in data:
            _checked_array(data, frames, place)
        elif "$image" in data:
            _checked_image(data, frames, place)
        else:
            for key, item in data.items():
                _check(item, frames, limits, depth + 1, f"{place}.{_checked_key(key, place)}")
    else:
        raise InvalidRequest(f"{place} is of a kind that arguments cannot have")


def _pack(value: Any, frames: list[Frame], limits: Limits, depth: int, place: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)):
        return _checked_scalar(value, limits, place)
    if isinstance(value, (list, tuple, dict)):
        _check_depth(depth, limits, place)
    if isinstance(value, (list, tuple)):
        return [
            _pack(item, frames, limits, depth + 1, f"{place}[{index}]")
            for index, item in enumerate(value)
        ]
    if isinstance(value, dict):
        return {
            _checked_key(key, place): _pack(item, frames, limits, depth + 1, f"{place}.{key}")
            for key, item in value.items()
        }
    # Only a program that has imported these libraries can hold their objects.
    numpy, pil = sys.modules.get("numpy"), sys.modules.get("PIL.Image")
    if pil is not None and isinstance(value, pil.Image):
        return _pack_image(value, frames)
    if numpy is not None and isinstance(value, numpy.generic):
        return _pack(value.item(), frames, limits, depth, place)
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _pack_array(value, frames, place)
    raise InvalidRequest(
        f"{place} is a {type(value).__name__}, which cannot be sent",
        hint="send numbers, texts, lists, maps, numpy arrays or PIL images",
    )


def _unpack(data: Any, frames: Sequence[Frame], limits: Limits, depth: int, place: str) -> Any:
    if data is None or isinstance(data, bool):
        return data
    if isinstance(data, (int, float, str)):
        return _checked_scalar(data, limits, place)
    if isinstance(data, (list, dict)):
        _check_depth(depth, limits, place)
    if isinstance(data, list):
        return [
            _unpack(item, frames, limits, depth + 1, f"{place}[{index}]")
            for index, item in enumerate(data)
        ]
    if isinstance(data, dict) and "$array" in data:
        return _unpack_array(data, frames, place)
    if isinstance(data, dict) and "$image" in data:
        return _unpack_image(data, frames, place)
    if isinstance(data, dict):
        return {
            _checked_key(key, place): _unpack(item, frames, limits, depth + 1, f"{place}.{key}")
            for key, item in data.items()
        }
    raise InvalidRequest(f"{place} is of a kind that arguments cannot have")


def _checked_scalar(value: int | float | str, limits: Limits, place: str) -> int | float | str:
    if isinstance(value, str) and len(value) > limits.max_text_chars:
        raise TooLarge(
            f"{place} has {len(value)} characters, the limit is {limits.max_text_chars}",
            hint="shorten the text",
        )
    if isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
        raise InvalidRequest(f"{place} does not fit into 64 bits")
    return value


def _checked_key(key: Any, place: str) -> str:
    if not isinstance(key, str) or key.startswith("$"):
        raise InvalidRequest(
            f"{place} has the key {str(key)[:40]!r}", hint="keys are texts without a leading $"
        )
    return key


def _check_depth(depth: int, limits: Limits, place: str) -> None:
    if depth >= limits.max_depth:
        raise TooLarge(f"{place[:80]} is nested deeper than {limits.max_depth} levels")


def _pack_array(array: np.ndarray[Any, Any], frames: list[Frame], place: str) -> dict[str, Any]:
    import numpy as np

    if array.dtype.name not in ARRAY_DTYPES:
        raise InvalidRequest(
            f"{place} is an array of {array.dtype.name}, which cannot be sent",
            hint=f"convert it to one of {', '.join(ARRAY_DTYPES)}",
        )
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    # A cast of a view with a zero in its shape is refused by memoryview, and has no bytes anyway.
    frames.append(little.reshape(-1).view(np.uint8).data if array.size else b"")
    return {"$array": len(frames) - 1, "dtype": array.dtype.name, "shape": list(array.shape)}


def _pack_image(image: Image.Image, frames: list[Frame]) -> dict[str, Any]:
    if image.mode not in IMAGE_MODES:
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    frames.append(image.tobytes())
    return {"$image": len(frames) - 1, "mode": image.mode, "size": list(image.size)}


def _checked_array(
    data: dict[str, Any], frames: Sequence[Frame], place: str
) -> tuple[str, list[int], Frame]:
    dtype, shape = data.get("dtype"), data.get("shape")
    if not isinstance(dtype, str) or dtype not in ARRAY_DTYPES:
        raise InvalidRequest(f"{place} is an array of unknown dtype {str(dtype)[:40]!r}")
    frame = _frame(data["$array"], frames, place)
    sizes = _checked_lengths(shape, place)
    expected = math.prod(sizes) * ARRAY_DTYPES[dtype]
    if len(frame) != expected:
        raise InvalidRequest(f"{place} needs a frame of {expected} bytes, it has {len(frame)}")
    return dtype, sizes, frame


def _unpack_array(data: dict[str, Any], frames: Sequence[Frame], place: str) -> Any:
    import numpy as np

    dtype, sizes, frame = _checked_array(data, frames, place)
    array = np.frombuffer(frame, dtype=np.dtype(dtype).newbyteorder("<")).reshape(sizes)
    array.flags.writeable = False
    return array


def _checked_image(
    data: dict[str, Any], frames: Sequence[Frame], place: str
) -> tuple[str, tuple[int, int], Frame]:
    mode = data.get("mode")
    if not isinstance(mode, str) or mode not in IMAGE_MODES:
        raise InvalidRequest(f"{place} is an image of unknown mode {str(mode)[:40]!r}")
    frame = _frame(data["$image"], frames, place)
    size = _checked_lengths(data.get("size"), place)
    if len(size) != 2 or 0 in size:
        raise InvalidRequest(f"{place} is an image without width and height")
    expected = size[0] * size[1] * IMAGE_MODES[mode]
    if len(frame) != expected:
        raise InvalidRequest(f"{place} needs a frame of {expected} bytes, it has {len(frame)}")
    return mode, (size[0], size[1]), frame


def _unpack_image(data: dict[str, Any], frames: Sequence[Frame], place: str) -> Any:
    from PIL import Image

    mode, size, frame = _checked_image(data, frames, place)
    return Image.frombytes(mode, size, bytes(frame))


def _frame(index: Any, frames: Sequence[Frame], place: str) -> Frame:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(frames):
        raise InvalidRequest(f"{place} refers to frame {str(index)[:40]}, of {len(frames)}")
    return frames[index]


def _checked_lengths(lengths: Any, place: str) -> list[int]:
    if not isinstance(lengths, list) or len(lengths) > 32:
        raise InvalidRequest(f"{place} has no proper shape")
    for length in lengths:
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length < 1 << 40:
            raise InvalidRequest(f"{place} has no proper shape")
    return lengths
