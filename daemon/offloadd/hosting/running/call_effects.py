"""Whether a pipeline's call exchanges attention processors, which are its modules' and not its own.

Some techniques (perturbed or self-attention guidance) put others in for the length of a call, by
what it was asked for. Nothing in a class says so but its code, so that is looked at: `__call__` and
whichever of the class's own methods it names, and those these name.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

_SETS = frozenset({"set_attn_processor", "set_default_attn_processor", "set_processor"})


@cache
def exchanges_processors(kind: Any) -> bool:
    """Whether calls of this class of pipeline may leave other processors in their modules."""
    seen: set[str] = set()
    waiting = ["__call__"]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for code in _codes(inspect.getattr_static(kind, name, None)):
            if _sets_processors(code):
                return True
            waiting += [one for one in code.co_names if one not in seen and hasattr(kind, one)]
    return False


def _sets_processors(code: CodeType) -> bool:
    return not _SETS.isdisjoint(code.co_names) or any(
        one.opname == "STORE_ATTR" and one.argval == "processor"
        for one in dis.get_instructions(code)
    )


def _codes(member: Any) -> Iterator[CodeType]:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    function = inspect.unwrap(member) if callable(member) else None
    if isinstance(function, FunctionType):
        yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
