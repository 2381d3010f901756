"""Answers of encoders, of which no more is kept than pipelines read.

A language model gives the states of all its layers, logits for a vocabulary and a cache; a pipeline
takes one or three of the layers. So each answer is watched: what is read of it for the first time
is copied to host memory, before the pipeline has it. Promises: an answer is of the class that the
encoder gave and reads as that one did, kept or fresh; what is handed out is the reader's own, to
write into as it likes; tensors that were one are one again. What a reader wants and nobody has read
before, the encoder computes then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, SupportsIndex

import torch
from transformers.utils import ModelOutput

from offloadd.hosting.embeddings.reading import Reading


def answer(reading: Reading) -> ModelOutput:
    """The answer, to be read like the encoder's own."""
    of: Any = reading.form.kind
    kind = _answer_class(of)
    made: ModelOutput = kind.__new__(kind)
    object.__setattr__(made, "_reading", reading)
    object.__setattr__(made, "_replaced", {})
    for name, found in reading.form.fields.items():
        if found is not None:
            # The keys alone; no method gives these values away.
            OrderedDict.__setitem__(made, name, None)
    return made


class Answer:
    """What `answer` makes of a class of outputs; mixed in before it."""

    _reading: Reading
    _replaced: dict[str, Any]
    _kind: type[ModelOutput]
    _names: frozenset[str]

    def __init_subclass__(cls) -> None:
        # Transformers' own would register a second class under the same name.
        return

    def __getattribute__(self, name: str) -> Any:
        if name not in type(self)._names:
            return super().__getattribute__(name)
        replaced = object.__getattribute__(self, "_replaced")
        return replaced[name] if name in replaced else _field(self._reading, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self)._names:
            object.__setattr__(self, name, value)
            return
        # What the reader has set itself.
        self._replaced[name] = value
        if value is not None:
            made: Any = self
            OrderedDict.__setitem__(made, name, None)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)

    def __getitem__(self, key: Any) -> Any:
        names = self._present()
        if isinstance(key, str):
            key = self._name_now(key)
            if key not in names:
                raise KeyError(key)
            return getattr(self, key)
        chosen = names[key]
        if isinstance(chosen, str):
            return getattr(self, chosen)
        return tuple(getattr(self, name) for name in chosen)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if self._name_now(key) in self._present() else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._present())

    def keys(self) -> Any:
        return dict.fromkeys(self._present()).keys()

    def values(self) -> Any:
        return {name: getattr(self, name) for name in self._present()}.values()

    def items(self) -> Any:
        return {name: getattr(self, name) for name in self._present()}.items()

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._present())

    def __reduce__(self) -> Any:
        # A copy is a plain one.
        return self._kind, tuple(getattr(self, one.name) for one in fields(self._kind))

    def held(self) -> list[Any]:
        """The tensors that are there for it."""
        return self._reading.held()

    def _present(self) -> list[str]:
        made: Any = self
        return list(OrderedDict.__iter__(made))

    def _name_now(self, key: str) -> str:
        # Of transformers: what older code calls `past_key_values` has another name now.
        rule = getattr(self, "_replace_old_cache_name", None)
        return str(rule(key)) if rule is not None else key


def _field(reading: Reading, name: str) -> Any:
    found = reading.form.fields[name]
    if found is None:
        return None
    if isinstance(found, int):
        return reading.tensor(found)
    return layers(reading, found) if isinstance(found, tuple) else reading.other(name)


@cache
def _answer_class(kind: Any) -> Any:
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_kind": kind,
        "_names": frozenset(one.name for one in fields(kind)),
    }
    return type(kind.__name__, (Answer, kind), members)


class Layers(tuple[Any, ...]):
    """A tuple of tensors that are read one by one; made by `layers`.

    Python's own reading comes to its methods. Torch takes the items of a tuple by itself, and finds
    `Unread` there.
    """

    _reading: Reading
    _numbers: Sequence[int | None]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return tuple(self._item(one) for one in self._numbers[key])
        return self._item(self._numbers[key])

    def __iter__(self) -> Iterator[Any]:
        return map(self._item, self._numbers)

    def __add__(self, other: Any) -> Any:
        return tuple(self) + tuple(other)

    def __radd__(self, other: Any) -> Any:
        return tuple(other) + tuple(self)

    def __mul__(self, times: SupportsIndex) -> Any:
        return tuple(self) * times

    __rmul__ = __mul__

    def __reduce__(self) -> Any:
        return tuple, (list(self),)

    def held(self) -> list[Any]:
        """The tensors that are there for it."""
        return self._reading.held()

    def _item(self, number: int | None) -> torch.Tensor | None:
        return None if number is None else self._reading.tensor(number)


def layers(reading: Reading, numbers: Sequence[int | None]) -> Layers:
    """The tensors with these numbers."""
    made = Layers(None if one is None else _unread(reading, one) for one in numbers)
    made._reading, made._numbers = reading, numbers
    return made


class Unread(torch.Tensor):
    """Stands in `Layers` for a tensor, and is that tensor for every function of torch."""

    _reading: Reading
    _number: int

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_read(tuple(args)), **_read(dict(kwargs or {})))


def _read(value: Any) -> Any:
    if isinstance(value, Unread):
        return value._reading.tensor(value._number)
    if isinstance(value, Layers):
        return tuple(value)
    if type(value) in (list, tuple):
        return type(value)(_read(one) for one in value)
    if type(value) is dict:
        return {key: _read(one) for key, one in value.items()}
    return value


def _unread(reading: Reading, number: int) -> Unread:
    made: Unread = torch.Tensor._make_subclass(Unread, torch.empty(0, device="meta"))
    made._reading, made._number = reading, number
    return made
