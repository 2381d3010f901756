"""One reader's share of an answer: what is kept is copied for it, what is not the encoder computes.

Promises: what is handed out is the reader's own; tensors that were one are one again; what is read
and was not kept is told to whoever keeps it before the reader has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers.utils import ModelOutput

from offloadd.hosting.embeddings.forms import Form


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
        self._given: dict[int, torch.Tensor] = {}
        self._fresh: dict[int, tuple[torch.Tensor, int]] | None = None
        self._others: dict[str, Any] = {}
        if output is not None:
            self._take(output)

    def other(self, name: str) -> Any:
        """What a field holds that is no tensor and no tuple of such."""
        self._have_fresh()
        return self._others[name]

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
