"""The hosted models as clients ask for them: hosted, loaded, pinned, unloaded.

A model is loaded once however many ask for it. After a load that failed, jobs are refused for a
while that doubles with each failure in a row; who asks for the load itself has put something right,
and is not kept waiting.
"""

from __future__ import annotations

import asyncio

from offload_protocol import codec
from offload_protocol.errors import Busy, InvalidRequest
from offloadd.channel.messages import LoadModel, Register, UnloadModel
from offloadd.channel.specs import ModelSpec
from offloadd.control.models.hosted_model import HostedModel, Waiter
from offloadd.control.models.worker_models import WorkerModels, taken, unloaded_meanwhile

LEAVING_RETRY_S = 0.5
"""When to ask again for a name whose model is being unloaded."""


class ModelTable(WorkerModels):
    """All hosted models, and what clients may do with them."""

    def host(self, spec: ModelSpec) -> HostedModel:
        """Make a model known; the same spec again changes nothing.

        A model that came by `load` and failed gives way to another spec. Raises `InvalidRequest`
        where the name belongs to another spec, `Busy` while that one is being unloaded.
        """
        model = self._models.get(spec.name)
        if model is not None and model.is_leaving:
            raise Busy(
                f"a model {spec.name!r} is being unloaded",
                hint="try again when it is gone",
                details={"retry_after_s": LEAVING_RETRY_S},
            )
        if model is not None and model.error and not model.configured and model.spec != spec:
            self._tell(UnloadModel(name=spec.name, forget=True))
            del self._models[spec.name]
            self._on_forgotten(spec.name)
            model = None
        if model is not None and model.spec != spec:
            raise InvalidRequest(
                f"a model {spec.name!r} is already hosted, from {model.spec.source} or with other "
                "settings",
                hint=(
                    f"choose another name than {spec.name!r}, or change its [[models]] entry"
                    if model.configured
                    else f"unload it first, or choose another name than {spec.name!r}"
                ),
            )
        if model is None:
            model = self._models[spec.name] = HostedModel(spec, configured=False)
            self._on_hosted(spec)
            self._tell(Register(spec=spec))
        return model

    def load(self, model: HostedModel) -> Waiter:
        """Load a model, or join those who wait for it; the future gives it when it is ready."""
        waiter = _new_waiter()
        model.is_wanted = True
        if model.leaves_when_free:
            # Who wants it now came later than who wanted it gone.
            model.leaves_when_free = False
            for overtaken in taken(model.unload_waiters):
                overtaken.set_result(model.info())
        if model.loaded is not None and not model.is_unloading:
            waiter.set_result(model.info())
            return waiter
        model.load_waiters.append(waiter)
        if not model.is_loading:
            # Without a description there is nothing to load yet; it may have failed earlier, and
            # its files may have been put right since.
            ask_again = model.error is not None and not model.is_registered
            model.is_loading = True
            model.error = None
            if model.is_registered:
                self._order(LoadModel(name=model.spec.name))
            elif ask_again:
                self._tell(Register(spec=model.spec))
        return waiter

    def ask_again(self, model: HostedModel) -> None:
        """Let a model that could not be described be looked at again, if that was a while ago.

        Raises why it could not, before that.
        """
        if model.described is None and model.error is not None:
            self.check(model)
            self.describe_again(model)

    def pin(self, model: HostedModel) -> Waiter:
        """Load a model and keep it in memory; the future gives it when it is ready."""
        self._set_pin(model, True)
        return self.load(model)

    def unpin(self, model: HostedModel) -> None:
        """Let a model go as any other."""
        self._set_pin(model, False)

    def let_go(self, model: HostedModel, reason: str) -> None:
        """Take a model out of memory that nobody uses; `reason` is for the log and for people."""
        model.idle_until_s = model.expires_at = None
        if model.loaded is not None and not model.is_unloading and self._has_worker:
            model.is_wanted = False
            self._order_unload(model, forget=False, reason=reason)

    def unload(self, model: HostedModel, is_used: bool, is_in_turn: bool = False) -> Waiter:
        """Take a model out of memory; the future gives it when it is gone.

        One that came by `load` is forgotten too, after the jobs that use it. Any other waits for
        those that are in the middle of it.
        """
        waiter = _new_waiter()
        model.is_wanted = False
        self._set_pin(model, False)
        model.is_leaving = not model.configured
        model.unload_waiters.append(waiter)
        if model.is_loading and not model.is_registered:
            self._failed(model, codec.error_info(unloaded_meanwhile(model)))
        if not self._has_worker:
            self._unloaded(model)
        elif model.configured and is_in_turn:
            model.leaves_when_free = True
        elif model.configured or not is_used:
            self._order_unload(model, forget=model.is_leaving, reason="left: a client unloaded it")
        return waiter

    def free(self, name: str) -> None:
        """No job is in the middle of a model any more; one that was to leave may go."""
        model = self._models.get(name)
        if model is not None and model.leaves_when_free:
            self._order_unload(model, forget=False, reason="left: a client unloaded it")

    def unused(self, name: str) -> None:
        """The last job on a model has ended; one that is leaving may go."""
        model = self._models.get(name)
        if model is None or not model.is_leaving:
            return
        if self._has_worker:
            self._order_unload(model, forget=True, reason="left: a client unloaded it")
        else:
            self._unloaded(model)


def _new_waiter() -> Waiter:
    return asyncio.get_running_loop().create_future()
