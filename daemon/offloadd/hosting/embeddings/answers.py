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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple, SupportsIndex

import torch
from transformers.utils import ModelOutput


class NotKept(Exception):
    """An answer is of a kind that cannot be given twice."""


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer looks like: its class, and for each field what is there.

    That is None, the number of a tensor, a tuple of numbers (and None), or `OTHER`.
    """

    kind: type[ModelOutput]
    fields: Mapping[str, Any]


OTHER = "other"
"""Something that is no tensor, such as a cache: whoever reads it needs the encoder."""


def form_of(output: Any, inputs: Iterable[torch.Tensor]) -> Form:
    """The form of an answer to calls with these inputs.

    Raises `NotKept` for another class than those of transformers, and where tensors share memory
    with inputs or, without being one, with each other: what is written into one would show in the
    other, but not in copies.
    """
    if not isinstance(output, ModelOutput):
        raise NotKept(type(output).__name__)
    numbers = _Numbers(inputs)
    found = {one.name: numbers.field(getattr(output, one.name)) for one in fields(output)}
    return Form(type(output), found)


class _Numbers:
    """Numbers tensors in the order in which they are met; the same view has one number."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        self._views: dict[Any, int] = {}
        self._storages: dict[Any, int] = {
            one.untyped_storage().data_ptr(): -1 for one in inputs if one.numel()
        }

    def field(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return self._number(value)
        if type(value) is tuple and all(
            one is None or isinstance(one, torch.Tensor) for one in value
        ):
            return tuple(None if one is None else self._number(one) for one in value)
        return OTHER

    def _number(self, tensor: torch.Tensor) -> int:
        is_plain = (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and not (tensor.requires_grad or tensor.is_inference() or tensor.is_quantized)
            and not (tensor.is_conj() or tensor.is_neg())
        )
        if not is_plain:
            raise NotKept("a tensor that is not plain")
        at: Any = tensor.untyped_storage().data_ptr() if tensor.numel() else object()
        view = (at, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        number = self._views.setdefault(view, len(self._views))
        if self._storages.setdefault(at, number) != number:
            raise NotKept("tensors that share memory")
        return number


class Kept(NamedTuple):
    """A tensor in host memory, and the device that it was on."""

    tensor: torch.Tensor
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Reading:
    """One answer as one reader has it: what was handed out, and where the rest comes from.

    `stored` are the tensors that are kept, by number; `output` is the encoder's answer where it has
    just computed; otherwise `compute` gives it when something is wanted that is not kept. `keep`
    is told of each tensor that is read and was not kept, and `spoil` if that is not what the
    encoder gave any more.
    """

    def __init__(
        self,
        form: Form,
        stored: Mapping[int, Kept],
        output: ModelOutput | None,
        compute: Callable[[], ModelOutput],
        keep: Callable[[int, torch.Tensor], None],
        spoil: Callable[[], None],
    ) -> None:
        self.form = form
        self._stored = stored
        self._compute = compute
        self._keep = keep
        self._spoil = spoil
        self._replaced: dict[str, Any] = {}
        self._given: dict[int, torch.Tensor] = {}
        self._fresh: dict[int, tuple[torch.Tensor, int]] | None = None
        self._others: dict[str, Any] = {}
        if output is not None:
            self._take(output)

    def field(self, name: str) -> Any:
        """What the answer's field holds."""
        if name in self._replaced:
            return self._replaced[name]
        found = self.form.fields[name]
        if found is None:
            return None
        if isinstance(found, int):
            return self.tensor(found)
        if isinstance(found, tuple):
            # They refer to this; if this held them as well, only the collector would let go of all.
            return layers(self, found)
        self._have_fresh()
        return self._others[name]

    def replace(self, name: str, value: Any) -> None:
        """The reader has set the field."""
        self._replaced[name] = value

    def tensor(self, number: int) -> torch.Tensor:
        """The reader's own copy of a tensor, or the encoder's, which nobody else has."""
        if number not in self._given:
            if self._fresh is None and number in self._stored:
                kept = self._stored[number]
                self._given[number] = kept.tensor.to(kept.device, copy=True)
            else:
                self._given[number] = self._fresh_tensor(number)
        return self._given[number]

    def held(self) -> list[Any]:
        """Everything that this holds on a device."""
        fresh = [tensor for tensor, _ in self._fresh.values()] if self._fresh else []
        return [*self._given.values(), *fresh, *self._others.values()]

    def _fresh_tensor(self, number: int) -> torch.Tensor:
        tensor, version = self._have_fresh()[number]
        if tensor._version == version:
            self._keep(number, tensor)
        else:
            # Somebody wrote into it by another way before it was read here.
            self._spoil()
        return tensor

    def _have_fresh(self) -> dict[int, tuple[torch.Tensor, int]]:
        if self._fresh is None:
            self._take(self._compute())
        assert self._fresh is not None  # it was taken
        return self._fresh

    def _take(self, output: ModelOutput) -> None:
        # The encoder computed this from the same call, so its form is the same.
        self._fresh = {}
        for name, found in self.form.fields.items():
            value = getattr(output, name)
            if isinstance(found, int):
                self._fresh[found] = (value, value._version)
            elif isinstance(found, tuple):
                for number, one in zip(found, value, strict=True):
                    if number is not None:
                        self._fresh[number] = (one, one._version)
            elif found is not None:
                self._others[name] = value


def answer(reading: Reading) -> ModelOutput:
    """The answer, to be read like the encoder's own."""
    of: Any = reading.form.kind
    kind = _answer_class(of)
    made: ModelOutput = kind.__new__(kind)
    object.__setattr__(made, "_reading", reading)
    for name, found in reading.form.fields.items():
        if found is not None:
            # The keys alone; no method gives these values away.
            OrderedDict.__setitem__(made, name, None)
    return made


class Answer:
    """What `answer` makes of a class of outputs; mixed in before it."""

    _reading: Reading
    _kind: type[ModelOutput]
    _names: frozenset[str]

    def __init_subclass__(cls) -> None:
        # Transformers' own would register a second class under the same name.
        return

    def __getattribute__(self, name: str) -> Any:
        if name in type(self)._names:
            return object.__getattribute__(self, "_reading").field(name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self)._names:
            object.__setattr__(self, name, value)
            return
        self._reading.replace(name, value)
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
