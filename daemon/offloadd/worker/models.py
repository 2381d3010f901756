"""The models that this worker knows, and those of them that are in memory.

A model is loaded once however many threads ask for it, by the thread that asks first, without the
device but for moments; and it is not unloaded while a job is in the middle of its call. One whose
memory others wanted rests, and is brought back in the same way by the next job on it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection

from offload_protocol.errors import Cancelled, InternalError, OffloadError, UnknownModel
from offloadd.channel.messages import Placed
from offloadd.channel.specs import ModelSpec
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.hosted import HostedModel, give_memory_back
from offloadd.hosting.loading.loading import OnComponent
from offloadd.hosting.noop import SOURCE as NOOP
from offloadd.hosting.noop import NoopModel
from offloadd.hosting.sources.describe import Description, describe
from offloadd.worker.baton import Baton
from offloadd.worker.device import Device, measure

LOOK_S = 0.1
"""How often a job that waits for another's load looks whether it was cancelled."""

_log = logging.getLogger(__name__)


class Models:
    """Known and loaded models by name; any thread may use it."""

    def __init__(self, device: Device, host: DeviceHost, baton: Baton) -> None:
        self._device = device
        self._host = host
        self._baton = baton
        self._changed = threading.Condition()
        self._known: dict[str, Description | NoopModel] = {}
        self._loaded: dict[str, HostedModel | NoopModel] = {}
        self._busy: set[str] = set()
        """Being loaded, unloaded, brought back or laid to rest by some thread."""
        self._users: Counter[str] = Counter()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all models' weights on the device; the caller has the baton."""
        return sum(model.resident_bytes for model in self._in_memory())

    def placed(self) -> dict[str, Placed]:
        """Where each component (`MODEL/COMPONENT`) of the models in memory is."""
        return {
            f"{model.description.spec.name}/{one.name}": Placed(
                one.resident_bytes, one.streamed_bytes, one.host_bytes
            )
            for model in self._in_memory()
            for one in model.components()
            if one.bytes
        }

    def register(self, spec: ModelSpec) -> Description | NoopModel:
        """Check a model and make it known; one of that name is unloaded if it was another.

        Raises what `describe` raises; a model known before stays as it was then.
        """
        description = self._describe(spec)
        before = self._known.get(spec.name)
        if before is not None and before.spec != spec:
            self.unload(spec.name)
        self._known[spec.name] = description
        return description

    def use(self, name: str, on_component: OnComponent) -> tuple[HostedModel | NoopModel, bool]:
        """The model, which stays in memory until `leave`; and whether this call has loaded it.

        Raises what loading raises, with nothing left behind, and what `on_component` raises.
        """
        with self._changed:
            while True:
                model = self._loaded.get(name)
                if name not in self._busy:
                    break
                if not self._changed.wait(LOOK_S):
                    on_component(0, 0)
            self._users[name] += 1
            if model is not None and (self._users[name] > 1 or not _is_short(model)):
                return model, False
            self._busy.add(name)
        try:
            with self._baton.held():
                now = self._load(name, on_component)
        except BaseException:
            self._set(name, None)
            self.leave(name)
            raise
        self._set(name, now)
        return now, model is None

    def let_rest(self, owners: Collection[str]) -> None:
        """The memory of these components (`MODEL/COMPONENT`) is wanted; idle models give it up."""
        wanted: dict[str, set[str]] = {}
        for owner in owners:
            wanted.setdefault(owner.rpartition("/")[0], set()).add(owner)
        for name, own in wanted.items():
            with self._changed:
                model = self._loaded.get(name)
                is_idle = name not in self._busy and not self._users[name]
                if is_idle:
                    self._busy.add(name)
            if not is_idle:
                self._host.arena.refuse(own)
                continue
            try:
                if isinstance(model, HostedModel):
                    with self._baton.held():
                        model.rest()
                    _log.info("model=%s rests: others want its memory", name)
            finally:
                self._set(name, None)

    def leave(self, name: str) -> None:
        """A user of the model is done with it."""
        with self._changed:
            self._users[name] -= 1
            if not self._users[name]:
                self._changed.notify_all()

    def is_used(self, name: str) -> bool:
        """Whether a job is in the middle of it."""
        with self._changed:
            return self._users[name] > 0

    def unload(self, name: str) -> None:
        """Take a model out of memory, if it is there, once no job is in the middle of it.

        Raises `InternalError` if something still holds it, which would be a leak.
        """
        with self._changed:
            self._changed.wait_for(lambda: name not in self._busy and not self._users[name])
            self._busy.add(name)
        try:
            with self._baton.held():
                self._unload(name)
        finally:
            self._set(name, None)

    def forget(self, name: str) -> None:
        """Make a model unknown; it is not in memory any more."""
        self._known.pop(name, None)

    def _load(self, name: str, on_component: OnComponent) -> HostedModel | NoopModel:
        resting = self._loaded.get(name)
        if isinstance(resting, HostedModel):
            return self._brought_back(name, resting, on_component)
        try:
            spec = self._known[name].spec
        except KeyError:
            raise UnknownModel(f"this worker knows no model {name!r}") from None
        # The files may have changed since the model was registered; what is checked is loaded.
        with self._baton.released():
            # It may have to read many files, or to rewrite pickles.
            description = self._describe(spec)
        if isinstance(description, NoopModel):
            return description
        memory = measure(self._device)
        free_bytes = memory.free_bytes + self._host.engine.stats().resident_bytes
        plan = description.plan(free_bytes, memory.total_bytes, self._device.is_cpu)
        return HostedModel.load(description, plan, self._host, on_component)

    def _brought_back(
        self, name: str, model: HostedModel, on_component: OnComponent
    ) -> HostedModel:
        try:
            model.gather(on_component)
        except Cancelled:
            raise
        except OffloadError:
            # Loaded anew, it is checked against what its files are then.
            del model
            self._unload(name)
            raise
        return model

    def _unload(self, name: str) -> None:
        model = self._loaded.get(name)
        if model is None:
            give_memory_back(self._device.torch_device)
            return
        del self._loaded[name]
        if held := model.unload():
            raise InternalError(f"model {name!r} was unloaded, and still held: {', '.join(held)}")
        _log.info("unloaded model=%s", name)

    def _set(self, name: str, model: HostedModel | NoopModel | None) -> None:
        with self._changed:
            if model is not None:
                self._loaded[name] = model
            self._busy.discard(name)
            self._changed.notify_all()

    def _in_memory(self) -> list[HostedModel | NoopModel]:
        with self._changed:
            return list(self._loaded.values())

    def _describe(self, spec: ModelSpec) -> Description | NoopModel:
        if spec.source == NOOP:
            return NoopModel(spec)
        return describe(spec, self._device.is_cpu, self._host.arena.recall, self._host.unpickler())


def _is_short(model: HostedModel | NoopModel) -> bool:
    return isinstance(model, HostedModel) and model.needs_gathering
