"""The parameter that stands in a module for a weight that is not on the device.

Promises: it holds no memory and answers shape, dtype and device like the weight; whatever reads its
values (a module that uses a child's weight without calling the child, a helper outside any forward)
gets the real ones through `WeightReader`, so that such code is slow but right; nothing can write
to it. Code that touches no absent weight runs as if this class did not exist, unlike under a mode
that watches every function: such a mode makes `nn.MultiheadAttention` take another path, and with
it other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from offloadd.offload.weights.packed import memory_of

Place = tuple[str, str]
"""A module path and the name of one of its parameters."""


class WeightReader(Protocol):
    """Where absent weights get their values from."""

    @property
    def device(self) -> torch.device:
        """The execution device, which absent weights answer as theirs."""
        ...

    def reading(self, place: Place) -> AbstractContextManager[torch.Tensor]:
        """The real weight, present until the context is left."""
        ...


class AbsentWeight(nn.Parameter):
    """A meta parameter that knows its place and its reader. Made by `absent_weight`."""

    _place: Place
    _reader: WeightReader

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = nn.Parameter(torch.clone(self).detach(), requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(f"{_describe(self)} cannot be pickled")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], AbsentWeight):
            special = _SPECIAL.get(func)
            if special is not None:
                return special(args[0])
            if _writes(func):
                raise RuntimeError(f"{_describe(args[0])} cannot be written to")
        if any(isinstance(value, AbsentWeight) for value in _flat(kwargs.get("out"))):
            raise RuntimeError("an absent weight cannot be written to")
        return _with_real_weights(func, args, kwargs)


def absent_weight(
    blank: torch.Tensor, place: Place, reader: WeightReader, *, requires_grad: bool = False
) -> AbsentWeight:
    """Stands for the weight at `place`; `blank` is a meta tensor of its shape and dtype."""
    if not blank.is_meta:
        raise ValueError(f"the blank for {place} holds memory on {blank.device}")
    weight: AbsentWeight = torch.Tensor._make_subclass(AbsentWeight, blank, requires_grad)
    weight._place = place
    weight._reader = reader
    return weight


def _with_real_weights(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call with the real weights; what would share their memory is copied, since that is reused."""
    borrowed: set[int] = set()
    with ExitStack() as readings:
        real: dict[Place, torch.Tensor] = {}

        def exchange(weight: AbsentWeight) -> torch.Tensor:
            place = weight._place
            if place not in real:
                real[place] = readings.enter_context(weight._reader.reading(place))
                borrowed.update(_memory(real[place]))
            # What is no tensor cannot be copied afterwards.
            return real[place].clone() if func in _GIVES_MEMORY_AWAY else real[place]

        real_args, real_kwargs = tree_map_only(AbsentWeight, exchange, (tuple(args), dict(kwargs)))
        result = func(*real_args, **real_kwargs)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta or tensor.layout is not torch.strided:
                return tensor
            shares = not borrowed.isdisjoint(_memory(tensor))
            return tensor.detach().clone() if shares else tensor

        return tree_map_only(torch.Tensor, keep, result)


def _memory(tensor: torch.Tensor) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in memory_of(tensor)}


def _flat(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _writes(func: Callable[..., Any]) -> bool:
    if func in _SETTERS:
        return True
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (
        name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    )


def _describe(weight: AbsentWeight) -> str:
    path, attribute = weight._place
    name = f"{path}.{attribute}" if path else attribute
    return f"the weight `{name}`, which is not on the device now,"


def _same(weight: AbsentWeight) -> AbsentWeight:
    with torch._C.DisableTorchFunctionSubclass():
        return absent_weight(
            weight.detach().as_subclass(torch.Tensor), weight._place, weight._reader
        )


def _device(weight: AbsentWeight) -> torch.device:
    return weight._reader.device


def _representation(weight: AbsentWeight) -> str:
    return f"AbsentWeight({'.'.join(filter(None, weight._place))}, {weight.dtype}, {weight.shape})"


def _getter(name: str) -> Callable[..., Any]:
    getter: Callable[..., Any] = getattr(torch.Tensor, name).__get__
    return getter


_METADATA: frozenset[Callable[..., Any]] = frozenset(
    [
        *(
            _getter(name)
            for name in (
                "shape",
                "dtype",
                "ndim",
                "layout",
                "itemsize",
                "nbytes",
                "requires_grad",
                "grad",
                "grad_fn",
                "is_leaf",
                "is_quantized",
                "is_sparse",
                "is_nested",
                "is_mkldnn",
            )
        ),
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.stride,
        torch.Tensor.storage_offset,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.is_floating_point,
        torch.Tensor.is_complex,
        torch.is_complex,
        torch.Tensor.__len__,
        torch.Tensor.__hash__,
        torch.Tensor.requires_grad_,
        getattr(torch.Tensor, "requires_grad").__set__,  # noqa: B009  typed as a plain bool
        torch.numel,
    ]
)
"""What the meta parameter answers by itself, as the weight would."""

_SPECIAL: dict[Callable[..., Any], Callable[[AbsentWeight], Any]] = {
    _getter("device"): _device,
    _getter("is_meta"): lambda weight: _device(weight).type == "meta",
    _getter("is_cpu"): lambda weight: _device(weight).type == "cpu",
    _getter("is_cuda"): lambda weight: _device(weight).type == "cuda",
    _getter("is_xpu"): lambda weight: _device(weight).type == "xpu",
    _getter("data"): _same,
    torch.Tensor.detach: _same,
    torch.detach: _same,
    torch.Tensor.__repr__: _representation,
}
"""What is answered without the values: a state dict holds absent weights, and prints as such."""

_SETTERS: frozenset[Callable[..., Any]] = frozenset(
    getattr(torch.Tensor, name).__set__ for name in ("data", "grad")
)

_GIVES_MEMORY_AWAY: frozenset[Callable[..., Any]] = frozenset(
    [
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
    ]
)
