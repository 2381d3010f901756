"""Lets the text encoders of one model answer from what they gave before: same owner, same call.

It stands before a module's own call, so that neither hooks nor the engine hear of a call that needs
nothing computed. Promises: numbers are those of a call that was made; an answer goes to the owner
for whom it was computed and to no other; a call that failed, or that changed anything beside its
answer, leaves nothing; without an owner nothing is reused.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from offloadd.hosting.embeddings.answers import answer
from offloadd.hosting.embeddings.encoder_state import (
    Held,
    global_settings,
    is_text_encoder,
    is_watched,
    settings_of,
)
from offloadd.hosting.embeddings.forms import Form, NotKept, form_of
from offloadd.hosting.embeddings.keys import NoDigest, digest
from offloadd.hosting.embeddings.reading import Kept, Reading
from offloadd.hosting.embeddings.store import EmbeddingStore, Entry, Key

MOST_CHANGES = 3
"""Calls in a row that changed something of their encoder, after which it is not tried any more."""

_log = logging.getLogger(__name__)
_numbers = count()


class EncoderReuse:
    """Of the text encoders among `modules`; each thread says on whose behalf it calls them.

    `on_hit` is told the name of a module that computes nothing this time.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        on_hit: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._own = threading.local()
        self._encoders = [
            _Encoder(module, store, device, self._owner, partial(on_hit, name))
            for name, module in modules.items()
            if is_text_encoder(module)
        ]

    @contextmanager
    def on_behalf(self, owner: str | None) -> Iterator[None]:
        """This thread's calls are this owner's; None: nothing is reused or kept."""
        before = self._owner()
        self._own.owner = owner
        try:
            yield
        finally:
            self._own.owner = before

    def forget(self) -> None:
        """Keep nothing of these encoders."""
        for encoder in self._encoders:
            encoder.forget()

    def close(self) -> None:
        """Let the modules be called as they are."""
        for encoder in self._encoders:
            encoder.close()

    def _owner(self) -> str | None:
        return getattr(self._own, "owner", None)


class _Encoder:
    """One module. Its class looks for `_compiled_call_impl` on the object at each call of it."""

    def __init__(
        self,
        module: nn.Module,
        store: EmbeddingStore,
        device: torch.device,
        owner: Callable[[], str | None],
        on_hit: Callable[[], None],
    ) -> None:
        self._module = weakref.ref(module)
        self._store = store
        self._device = device
        self._owner = owner
        self._on_hit = on_hit
        self._number = next(_numbers)
        self._changes = 0
        module.__dict__["_compiled_call_impl"] = self._call

    def forget(self) -> None:
        self._store.drop(self._number)

    def close(self) -> None:
        self.forget()
        module = self._module()
        if module is not None:
            module.__dict__.pop("_compiled_call_impl", None)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # it is being called
        key = self._key(module, args, kwargs)
        if key is None:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        entry = self._store.find(key)
        if entry is None:
            output, form = self._computed(module, args, kwargs)
            if form is None:
                return output
            return answer(self._reading(key, self._store.begin(key, form), lambda: output, output))
        self._on_hit()
        # Whoever called may write into what it gave, before it reads all of the answer.
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))

        def compute() -> Any:
            with torch.no_grad():
                output, form = self._computed(module, args, kwargs)
            if form is None or self._store.begin(key, form) is not entry:
                # It went meanwhile, or may not be kept: this reader alone has it.
                self._store.discard(key)
            return output

        return answer(self._reading(key, entry, compute))

    def _reading(
        self, key: Key, entry: Entry, compute: Callable[[], Any], output: Any = None
    ) -> Reading:
        return Reading(
            entry.form,
            entry.blobs if output is None else {},
            output,
            compute,
            lambda number, tensor: self._keep(key, entry, number, tensor),
            lambda: self._store.discard(key),
        )

    def _key(self, module: nn.Module, args: Any, kwargs: Any) -> Key | None:
        owner = self._owner()
        may_be_reused = (
            owner is not None
            and self._store.is_on
            and self._changes < MOST_CHANGES
            and not torch.is_grad_enabled()
            and not is_watched(module)
        )
        if not may_be_reused:
            return None
        settings = (settings_of(module), global_settings(self._device))
        try:
            return Key(self._number, digest(owner, settings, args, kwargs))
        except NoDigest:
            return None

    def _computed(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Form | None]:
        """What the module answers, and its form, or None where it may not be kept."""
        before = Held.now(module, self._device)
        output = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        after = Held.now(module, self._device)
        if after.is_of_other_layers(before):
            return output, None
        if after.differs_from(before):
            self._note_change(module)
            return output, None
        self._changes = 0
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        try:
            return output, form_of(output, inputs)
        except NotKept:
            return output, None

    def _keep(self, key: Key, entry: Entry, number: int, tensor: torch.Tensor) -> None:
        copied = tensor.detach().to("cpu", copy=True)
        if copied.stride() == tensor.stride():
            self._store.add(key, entry, number, Kept(copied, tensor.device))
        else:
            # Kernels may follow how a tensor lies in memory.
            self._store.discard(key)

    def _note_change(self, module: nn.Module) -> None:
        # What was kept may have followed from a state that is another now.
        self.forget()
        self._changes += 1
        if self._changes == MOST_CHANGES:
            _log.info("%s keeps state of its calls: not reused", type(module).__name__)
