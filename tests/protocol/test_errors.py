"""Errors keep their code, sentence, hint and details on every way they travel."""

from __future__ import annotations

import copy
import pickle

import pytest

from offload_protocol import codec, errors
from offload_protocol.errors import ErrorCode, OffloadError

CLASSES = OffloadError.__subclasses__()


def test_every_code_has_exactly_one_class() -> None:
    codes = [kind.code for kind in CLASSES if kind.__module__ == errors.__name__]
    assert sorted(codes) == sorted(ErrorCode)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_an_error_is_the_same_after_the_wire(code: ErrorCode) -> None:
    error = errors.from_code(code, "what happened", "what to do", {"size_bytes": 3})
    again = codec.to_exception(codec.error_info(error))
    assert type(again) is type(error)
    assert again.code is code
    assert (again.message, again.hint, again.details) == (
        "what happened",
        "what to do",
        {"size_bytes": 3},
    )


def test_an_error_is_the_same_after_pickling_and_copying() -> None:
    error = errors.Busy("full", hint="later", details={"retry_after_s": 2.0})
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is errors.Busy
        assert str(again) == "full (later)"
        assert again.details == {"retry_after_s": 2.0}


def test_a_code_that_is_not_known_yet_is_still_an_error() -> None:
    error = errors.from_code("from_the_future", "what happened")
    assert type(error) is OffloadError
    assert str(error) == "what happened"
