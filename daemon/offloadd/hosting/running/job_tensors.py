"""The tensors of a job that is in the middle of its call: found on its stack, counted, moved aside.

They are moved by their storages: each storage is emptied in place and filled again in place, so
that every view of it, wherever it is held, stays a view of the same memory. What lies on the
evaluation stack of a frame has no name and is not found; it stays where it is and stays right.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch import nn

from offloadd.hosting.embeddings.answers import Answer, Layers, Unread

_LEAVES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, Unread)


def tensors_of(frame: FrameType | None, outermost: FrameType) -> Iterator[torch.Tensor]:
    """Every tensor that the frames hold, from `frame` outwards to `outermost`, both included.

    Containers are looked into, and objects of diffusers (schedulers, outputs, the pipeline's own
    attributes); modules are not, since what they hold is the model's.
    """
    found: list[Any] = []
    while frame is not None:
        found += _locals(frame)
        if frame is outermost:
            break
        frame = frame.f_back
    return _inside(found)


def storages_of(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> list[torch.UntypedStorage]:
    """The storages on the device behind the tensors, each once, without those of parameters."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        is_plain = tensor.layout == torch.strided and not isinstance(tensor, nn.Parameter)
        if is_plain and tensor.device == device:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages.setdefault(storage.data_ptr(), storage)
    return list(storages.values())


class MovedAside:
    """Storages whose bytes are in host memory; the storages themselves are empty meanwhile."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages:
            if storage.resizable():
                kept = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
                kept.copy_(storage)
                self._moved.append((storage, kept))
                storage.resize_(0)

    @property
    def size_bytes(self) -> int:
        return sum(kept.nbytes() for _, kept in self._moved)

    def move_back(self) -> None:
        """Fill the storages again; raises what allocating raises, and may then be called again."""
        while self._moved:
            storage, kept = self._moved[-1]
            storage.resize_(kept.nbytes())
            storage.copy_(kept)
            self._moved.pop()


def _locals(frame: FrameType) -> list[Any]:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return []
    names = frame.f_locals
    values = list(names.values())
    if sys.version_info < (3, 13):
        # Up to 3.12 the frame keeps this copy of its locals, which would keep tensors alive.
        names.clear()
    return values


def _inside(values: list[Any]) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    waiting = deque(values)
    while waiting:
        value = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        else:
            waiting.extend(_parts(value))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, (Answer, Layers)):
        # To look at what they stand for would compute it.
        return value.held()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, GeneratorType):
        return _locals(value.gi_frame) if value.gi_frame is not None else ()
    if isinstance(value, (nn.Module, type)):
        return ()
    if type(value).__module__.startswith("diffusers."):
        return vars(value).values() if hasattr(value, "__dict__") else ()
    return ()
