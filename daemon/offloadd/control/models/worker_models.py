"""The hosted models as the worker has them: what it said of each, and who is answered by that.

One that was loaded on purpose is loaded again when a new worker takes over; but not one whose
loading the old worker died of. Each coming and going has its reason.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator

from offload_protocol import codec
from offload_protocol.errors import Cancelled, OffloadError, UnknownModel
from offload_protocol.records import ErrorInfo
from offloadd.channel.messages import (
    LoadModel,
    ModelDescribed,
    ModelFailed,
    ModelLoaded,
    ModelUnloaded,
    Register,
    ToWorker,
    UnloadModel,
)
from offloadd.channel.specs import ModelSpec
from offloadd.control.models.hosted_model import HostedModel, Waiter
from offloadd.control.models.load_failures import check_pause, note_failure

_log = logging.getLogger(__name__)


class WorkerModels:
    """All hosted models. `order` hands a message to the worker, and is not called without one.

    `on_hosted` and `on_forgotten` are called with models that come and go beside the configuration,
    `on_pinned` with those that are pinned, or not any more.
    """

    def __init__(
        self,
        configured: Iterable[ModelSpec],
        order: Callable[[ToWorker], None],
        clock: Callable[[], float],
        on_hosted: Callable[[ModelSpec], None] = lambda spec: None,
        on_forgotten: Callable[[str], None] = lambda name: None,
        on_pinned: Callable[[str, bool], None] = lambda name, is_pinned: None,
    ) -> None:
        self._order = order
        self._clock = clock
        self._on_hosted = on_hosted
        self._on_forgotten = on_forgotten
        self._on_pinned = on_pinned
        self._has_worker = False
        self._models = {
            spec.name: HostedModel(spec, configured=True, is_wanted=spec.preload)
            for spec in configured
        }

    def __iter__(self) -> Iterator[HostedModel]:
        return iter(sorted(self._models.values(), key=lambda model: model.spec.name))

    def find(self, name: str) -> HostedModel:
        """The model of that name; raises `UnknownModel` with the names that are near or known."""
        model = self._models.get(name)
        if model is not None and not model.is_leaving:
            return model
        raise _unknown(name, (one for one, model in self._models.items() if not model.is_leaving))

    def get(self, name: str) -> HostedModel | None:
        """The model of that name, even if it is leaving."""
        return self._models.get(name)

    def restore(self, spec: ModelSpec) -> None:
        """Know a model that came by `load` to an earlier daemon; the configuration goes first."""
        if spec.name in self._models:
            self._on_forgotten(spec.name)
        else:
            self._models[spec.name] = HostedModel(spec, configured=False)

    def restore_pin(self, name: str) -> None:
        """Pin what was pinned under an earlier daemon; it is loaded when a worker takes orders."""
        model = self._models.get(name)
        if model is None:
            self._on_pinned(name, False)
        else:
            model.is_pinned = model.is_wanted = True

    @property
    def pinned(self) -> frozenset[str]:
        """The models that stay in memory whatever comes."""
        return frozenset(name for name, model in self._models.items() if model.is_pinned)

    @property
    def under_load(self) -> frozenset[str]:
        """The models that the worker loads because clients asked for that."""
        return frozenset(
            name for name, model in self._models.items() if model.is_loading and model.is_registered
        )

    def note_sharing(self, name: str, is_better_shared: bool) -> None:
        """The worker says whether jobs on a model take less time together."""
        if (model := self._models.get(name)) is not None:
            model.shares = is_better_shared

    def note_activations(self, name: str, activations_bytes: int) -> None:
        """A job on a model has taken so much of the device by itself."""
        if (model := self._models.get(name)) is not None:
            model.activations_bytes = max(model.activations_bytes, activations_bytes)

    def check(self, model: HostedModel) -> None:
        """Raise why a model cannot be loaded, for a while after that failed."""
        check_pause(model, self._clock())

    # --- what the worker says -------------------------------------------------------------------

    def worker_ready(self) -> None:
        """A new worker takes orders: make every model known to it, and load those that are wanted.

        Each is loaded once it is described.
        """
        self._has_worker = True
        for model in self:
            model.is_loading = model.is_wanted and not model.is_leaving
            self._order(Register(spec=model.spec))

    def worker_lost(self, error: OffloadError) -> None:
        """The worker has died, and with it everything in its memory.

        Loads that a living worker was busy with fail; those that waited for a worker go on waiting.
        """
        had_worker, self._has_worker = self._has_worker, False
        for model in list(self._models.values()):
            was_registered, model.is_registered = model.is_registered, False
            if model.loaded is not None:
                model.loaded, model.reason = None, f"left: {error.message}"
            model.is_unloading = model.leaves_when_free = False
            model.idle_until_s = model.expires_at = None
            if model.is_loading and had_worker and was_registered:
                model.is_wanted = False
                self._failed(model, codec.error_info(error))
            if model.unload_waiters:
                self._unloaded(model)

    def described(self, news: ModelDescribed) -> None:
        """What a registered model is."""
        if (model := self._models.get(news.name)) is not None:
            model.described, model.is_registered, model.error = news, True, None
            if model.is_loading:
                self._order(LoadModel(name=news.name))

    def describe_again(self, model: HostedModel) -> None:
        """Something has changed since a model could not be described: look again."""
        model.error = None
        self._tell(Register(spec=model.spec))

    def loaded(self, news: ModelLoaded) -> None:
        """A model is in memory."""
        model = self._models.get(news.name)
        if model is None:
            return
        model.reason = "pinned" if model.is_pinned else "loaded" if model.is_wanted else "for a job"
        model.failures = 0
        model.loaded, model.error, model.is_loading = news, None, False
        for waiter in taken(model.load_waiters):
            waiter.set_result(model.info())

    def failed(self, news: ModelFailed) -> None:
        """A model cannot be described or loaded, or its memory does not come back."""
        model = self._models.get(news.name)
        if model is None:
            return
        was_loading = model.is_loading
        model.is_unloading = False
        self._failed(model, news.error)
        if not was_loading:
            for waiter in taken(model.unload_waiters):
                waiter.set_exception(codec.to_exception(news.error))

    def unloaded(self, news: ModelUnloaded) -> None:
        """A model's memory has been given back."""
        if (model := self._models.get(news.name)) is not None:
            self._unloaded(model)

    def close(self, error: OffloadError) -> None:
        """Answer everybody who waits with an error."""
        for model in self._models.values():
            for waiter in taken(model.load_waiters) + taken(model.unload_waiters):
                waiter.set_exception(error)

    def _set_pin(self, model: HostedModel, is_pinned: bool) -> None:
        if model.is_pinned != is_pinned:
            model.is_pinned = is_pinned
            self._on_pinned(model.spec.name, is_pinned)

    def _tell(self, message: ToWorker) -> None:
        # Without a worker nothing is lost: `worker_ready` says it all anew.
        if self._has_worker:
            self._order(message)

    def _order_unload(self, model: HostedModel, forget: bool, reason: str) -> None:
        _log.info("model %s %s", model.spec.name, reason)
        model.reason, model.is_unloading, model.leaves_when_free = reason, True, False
        self._order(UnloadModel(name=model.spec.name, forget=forget))

    def _failed(self, model: HostedModel, error: ErrorInfo) -> None:
        note_failure(model, error, self._clock())
        for waiter in taken(model.load_waiters):
            waiter.set_exception(codec.to_exception(error))

    def _unloaded(self, model: HostedModel) -> None:
        model.loaded, model.is_unloading = None, False
        if model.is_leaving:
            self._models.pop(model.spec.name, None)
            self._on_forgotten(model.spec.name)
            for waiter in taken(model.load_waiters):
                waiter.set_exception(unloaded_meanwhile(model))
        for waiter in taken(model.unload_waiters):
            waiter.set_result(model.info())


def _unknown(name: str, hosted: Iterable[str]) -> UnknownModel:
    names = sorted(hosted)
    near = difflib.get_close_matches(name, names, n=1)
    return UnknownModel(
        f"no model {name[:200]!r} is hosted here",
        hint=f"did you mean {near[0]!r}?" if near else f"hosted are: {', '.join(names)}",
        details={"models": names},
    )


def unloaded_meanwhile(model: HostedModel) -> OffloadError:
    """What those hear who waited for a load that was called off."""
    return Cancelled(
        f"the model {model.spec.name!r} was unloaded before it was ready", hint="load it again"
    )


def taken(waiters: list[Waiter]) -> list[Waiter]:
    """Those who still wait, each of whom is to be answered; the list is empty afterwards."""
    open_ones = [waiter for waiter in waiters if not waiter.done()]
    waiters.clear()
    return open_ones
