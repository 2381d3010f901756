"""What a pipeline's call takes, as kinds of plain values, read from its type annotations.

Callables and torch generators are never parameters: no code comes from clients, and noise comes
from the request's seed.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

_NEVER = frozenset({"self", "return_dict", "generator"})
_PLAIN: dict[Any, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    type(None): "none",
    Image.Image: "image",
    np.ndarray: "array",
    torch.Tensor: "array",
}
_LISTS = (list, tuple, set)
_PLAIN_ITEMS = frozenset({"bool", "int", "float", "str", "none"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """A keyword argument. `kinds` is empty where any kind may do.

    `wants_tensor` says that arrays are to be given as tensors, `wants_tuple` that lists are to be
    given as tuples.
    """

    name: str
    kinds: tuple[str, ...]
    required: bool
    wants_tensor: bool
    wants_tuple: bool
    items: tuple[str, ...] = ()
    """The kinds of a list's items, where the annotation names plain ones alone."""


def call_parameters(pipeline: type[Any]) -> dict[str, Parameter]:
    """The parameters of a pipeline class's call that a client may set, in order."""
    call = pipeline.__call__
    hints = _hints(call)
    return {
        name: _parameter(name, parameter, hints.get(name, inspect.Parameter.empty))
        for name, parameter in inspect.signature(call).parameters.items()
        if _is_settable(name, parameter, hints.get(name))
    }


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(call)
    except (NameError, TypeError, AttributeError):
        # A name that is only imported for type checkers; the annotations that are there still say
        # more than nothing.
        return dict(inspect.get_annotations(call))


def _is_settable(name: str, parameter: inspect.Parameter, hint: Any) -> bool:
    if name in _NEVER or "callback" in name:
        return False
    if isinstance(hint, str) and "Callable" in hint:
        return False
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return False
    members = [member for member in _members(hint) if member is not type(None)]
    return not members or not all(_is_callable(member) for member in members)


def _parameter(name: str, parameter: inspect.Parameter, hint: Any) -> Parameter:
    members = _members(hint)
    return Parameter(
        name=name,
        kinds=_kinds(members, parameter.default),
        required=parameter.default is inspect.Parameter.empty,
        wants_tensor=_mentions(members, torch.Tensor) and not _mentions(members, np.ndarray),
        wants_tuple=_lists(members) == {tuple},
        items=_item_kinds(members),
    )


def _members(hint: Any) -> tuple[Any, ...]:
    if hint is None or hint is inspect.Parameter.empty:
        return ()
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(inner for part in typing.get_args(hint) for inner in _members(part) or (part,))
    if typing.get_origin(hint) is typing.Annotated:
        return _members(typing.get_args(hint)[0])
    return (hint,)


def _kinds(members: tuple[Any, ...], default: Any) -> tuple[str, ...]:
    found = [_kind(member) for member in members if not _is_callable(member)]
    if not found or None in found:
        return ()
    kinds = list(dict.fromkeys(kind for kind in found if kind is not None))
    # Many signatures say `str` and mean "or nothing", because the default is None.
    if default is None and "none" not in kinds:
        kinds.append("none")
    if "float" in kinds and "int" not in kinds:
        kinds.append("int")
    return tuple(kinds)


def _item_kinds(members: tuple[Any, ...]) -> tuple[str, ...]:
    lists = [one for one in members if (typing.get_origin(one) or one) in _LISTS]
    inner = [part for one in lists for part in typing.get_args(one) if part is not Ellipsis]
    kinds = _kinds(tuple(part for one in inner for part in _members(one)), inspect.Parameter.empty)
    # Pipelines take more kinds of nested pictures and arrays than their annotations say.
    bare = any(not typing.get_args(one) for one in lists)
    return () if bare or not set(kinds) <= _PLAIN_ITEMS else kinds


def _kind(member: Any) -> str | None:
    origin = typing.get_origin(member) or member
    if origin is typing.Literal:
        return "str" if all(isinstance(one, str) for one in typing.get_args(member)) else None
    if _is_tensor(origin):
        return "array"
    if not inspect.isclass(origin):
        return None
    if issubclass(origin, Image.Image):
        return "image"
    if issubclass(origin, _LISTS):
        return "list"
    return "map" if issubclass(origin, dict) else _PLAIN.get(origin)


def _is_callable(member: Any) -> bool:
    origin = typing.get_origin(member) or member
    if origin is Callable or origin is torch.Generator:
        return True
    # Callback classes of diffusers are callables with a name.
    return inspect.isclass(origin) and origin.__name__.endswith(("Callback", "Callbacks"))


def _mentions(members: tuple[Any, ...], kind: type[Any]) -> bool:
    return any(
        (_is_tensor(member) if kind is torch.Tensor else member is kind)
        or _mentions(typing.get_args(member), kind)
        for member in members
    )


def _is_tensor(member: Any) -> bool:
    # torch.FloatTensor and its like are no classes that inherit from torch.Tensor.
    return member is torch.Tensor or isinstance(member, type(torch.FloatTensor))


def _lists(members: tuple[Any, ...]) -> set[Any]:
    origins = {typing.get_origin(member) or member for member in members}
    return {origin for origin in origins if origin in _LISTS}
