"""The models that this worker knows, and those of them that are in memory."""

from __future__ import annotations

import logging

from offload_protocol.errors import InternalError, UnknownModel
from offloadd.channel.specs import ModelSpec
from offloadd.hosting.describe import Description, describe
from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.hosted import HostedModel, give_memory_back
from offloadd.hosting.loading import OnComponent
from offloadd.hosting.noop import SOURCE as NOOP
from offloadd.hosting.noop import NoopModel
from offloadd.worker.device import Device, measure

_log = logging.getLogger(__name__)


class Models:
    """Known and loaded models by name; used by the device thread alone."""

    def __init__(self, device: Device, host: DeviceHost) -> None:
        self._device = device
        self._host = host
        self._known: dict[str, Description | NoopModel] = {}
        self._loaded: dict[str, HostedModel | NoopModel] = {}

    @property
    def resident_bytes(self) -> int:
        """Bytes of all models' weights on the device."""
        return sum(model.resident_bytes for model in self._loaded.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of all models' weights in host memory; what models share counts for each."""
        return sum(one.host_bytes for model in self._loaded.values() for one in model.components())

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

    def description(self, name: str) -> Description | NoopModel:
        """What is known of a model; raises `UnknownModel`."""
        try:
            return self._known[name]
        except KeyError:
            raise UnknownModel(f"this worker knows no model {name!r}") from None

    def is_loaded(self, name: str) -> bool:
        return name in self._loaded

    def load(self, name: str, on_component: OnComponent) -> HostedModel | NoopModel:
        """The model, loaded if it was not; raises what loading raises, with nothing left behind."""
        if name in self._loaded:
            return self._loaded[name]
        # The files may have changed since the model was registered; what is checked is loaded.
        description = self._describe(self.description(name).spec)
        if isinstance(description, NoopModel):
            self._loaded[name] = description
            return description
        memory = measure(self._device)
        free_bytes = memory.free_bytes + self._host.engine.stats().resident_bytes
        plan = description.plan(free_bytes, memory.total_bytes, self._device.is_cpu)
        model = HostedModel.load(description, plan, self._host, on_component)
        self._loaded[name] = model
        return model

    def unload(self, name: str) -> None:
        """Take a model out of memory, if it is there.

        Raises `InternalError` if something still holds it, which would be a leak.
        """
        model = self._loaded.pop(name, None)
        if model is None:
            give_memory_back(self._device.torch_device)
            return
        if held := model.unload():
            raise InternalError(f"model {name!r} was unloaded, and still held: {', '.join(held)}")
        _log.info("unloaded model=%s", name)

    def forget(self, name: str) -> None:
        """Make a model unknown; it is not in memory any more."""
        self._known.pop(name, None)

    def _describe(self, spec: ModelSpec) -> Description | NoopModel:
        if spec.source == NOOP:
            return NoopModel(spec)
        return describe(spec, self._device.is_cpu, self._host.arena.recall)
