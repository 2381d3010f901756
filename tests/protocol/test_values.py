"""Arguments and outputs come through pack and unpack unchanged; references are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from offload_protocol.errors import InvalidRequest, OffloadError, TooLarge
from offload_protocol.limits import DEFAULT_LIMITS, Limits
from offload_protocol.values import ARRAY_DTYPES, Frame, check, pack, unpack


def through(value: Any) -> Any:
    frames: list[Frame] = []
    data = pack(value, frames)
    check(data, frames)
    return unpack(data, frames)


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=9)
keys = st.text(max_size=5).filter(lambda key: not key.startswith("$"))
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@given(nested)
def test_plain_values_come_through(value: Any) -> None:
    assert through(value) == value


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_come_through_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, size=shape).astype(dtype)
    result = through({"deep": [array]})["deep"][0]
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    assert np.array_equal(result, array)
    assert not result.flags.writeable


def test_arrays_of_any_order_come_through() -> None:
    array = np.arange(24, dtype=">f4").reshape(2, 3, 4)
    for view in (array.T, array[:, ::-1], array[1:, :, ::2]):
        assert np.array_equal(through(view), view)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_images_come_through_bit_for_bit(mode: str) -> None:
    image = Image.frombytes(mode, (3, 2), bytes(range(6 * len(mode.replace("L", "1")))))
    result = through(image)
    assert (result.mode, result.size, result.tobytes()) == (mode, (3, 2), image.tobytes())


def test_other_images_become_colour() -> None:
    assert through(Image.new("1", (2, 2), 1)).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (2, 2))
    palette.info["transparency"] = 0
    assert through(palette).mode == "RGBA"


def test_numpy_scalars_become_numbers() -> None:
    assert through([np.float32(1.5), np.int64(3), np.bool_(True)]) == [1.5, 3, True]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (print, "is a builtin_function_or_method, which cannot be sent"),
        ({1: 2}, "has the key '1'"),
        ({"$array": 0}, "without a leading"),
        (1 << 64, "64 bits"),
        ([{"a": b"bytes"}], r"value\[0\].a is a bytes"),
        (np.array(["text"]), "array of str"),
        (np.array([object()]), "array of object"),
        (np.array([1j]), "array of complex128"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        pack(value, [])


def test_text_and_depth_are_limited_on_both_ways() -> None:
    limits = Limits(max_text_chars=5, max_depth=2)
    for way in (
        lambda one: pack(one, [], limits),
        lambda one: unpack(one, [], limits),
        lambda one: check(one, [], limits),
    ):
        way([["12345"]])
        with pytest.raises(TooLarge, match=r"value\[0\]\[0\] has 6 characters, the limit is 5"):
            way([["123456"]])
        with pytest.raises(TooLarge, match="nested deeper than 2"):
            way([[["1"]]])


ARRAY = {"$array": 0, "dtype": "float32", "shape": [2, 3]}
IMAGE = {"$image": 0, "mode": "RGB", "size": [2, 4]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({**ARRAY, "$array": 1}, "refers to frame 1, of 1"),
        ({**ARRAY, "$array": -1}, "refers to frame -1"),
        ({**ARRAY, "$array": True}, "refers to frame True"),
        ({**ARRAY, "$array": "0"}, "refers to frame 0"),
        ({**ARRAY, "dtype": "object"}, "unknown dtype 'object'"),
        ({**ARRAY, "dtype": ["float32"]}, "unknown dtype"),
        ({**ARRAY, "shape": [2, 4]}, "needs a frame of 32 bytes, it has 24"),
        ({**ARRAY, "shape": [-2, -3]}, "no proper shape"),
        ({**ARRAY, "shape": [1 << 40]}, "no proper shape"),
        ({**ARRAY, "shape": [2, 3.0]}, "no proper shape"),
        ({**ARRAY, "shape": [1] * 33}, "no proper shape"),
        ({**ARRAY, "shape": "6"}, "no proper shape"),
        ({"$array": 0}, "unknown dtype"),
        ({**IMAGE, "mode": "CMYK"}, "unknown mode 'CMYK'"),
        ({**IMAGE, "size": [2, 5]}, "needs a frame of 30 bytes, it has 24"),
        ({**IMAGE, "size": [0, 5]}, "without width and height"),
        ({**IMAGE, "size": [24]}, "without width and height"),
        ({**IMAGE, "size": [1 << 39, 1 << 39]}, "needs a frame of"),
        ({"$other": 0}, "has the key '\\$other'"),
        ({"a": b"bytes"}, "of a kind that arguments cannot have"),
    ],
)
def test_references_that_do_not_fit_are_refused_alike_by_unpack_and_check(
    data: Any, says: str
) -> None:
    frames = [bytes(24)]
    with pytest.raises(InvalidRequest, match=says) as unpacked:
        unpack(data, frames)
    with pytest.raises(InvalidRequest, match=says) as checked:
        check(data, frames)
    assert str(unpacked.value) == str(checked.value)


references = st.fixed_dictionaries(
    {},
    optional={
        "$array": st.integers(-1, 2),
        "$image": st.integers(-1, 2),
        "dtype": st.sampled_from(["uint8", "float32", "x"]),
        "shape": st.lists(st.integers(-1, 4), max_size=3),
        "mode": st.sampled_from(["L", "RGB", "x"]),
        "size": st.lists(st.integers(-1, 4), max_size=3),
    },
)


@given(references, st.lists(st.binary(max_size=12), max_size=2))
def test_check_judges_as_unpack_does(data: Any, frames: list[Frame]) -> None:
    outcomes = []
    for judge in (check, unpack):
        try:
            judge(data, frames, DEFAULT_LIMITS)
        except OffloadError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("fits")
    assert outcomes[0] == outcomes[1]
