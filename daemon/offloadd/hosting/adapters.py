"""The adapters of one model in memory: loaded when first asked for, worn by one run at a time.

Promises: loading touches no base weight, and one that fails leaves the model as it was; a run wears
what it asked for whoever has used the model since it had the device last, and a model that wears
none computes the numbers of one that has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.utils.peft_utils import set_adapter_layers, set_weights_and_activate_adapters
from torch import nn
from transformers import PreTrainedModel

from offload_protocol.errors import InvalidRequest
from offload_protocol.messages import AdapterChoice
from offloadd.channel.specs import AdapterSpec
from offloadd.hosting.sources.adapter_files import adapter_file
from offloadd.hosting.sources.adapter_names import AdapterBase
from offloadd.offload.engine import Engine


class ModelAdapters:
    """Adapters beside a pipeline whose components are on the engine; its thread has the turn.

    `hosted` are the engine's names of the components.
    """

    def __init__(
        self,
        specs: Iterable[AdapterSpec],
        pipeline: Any,
        base: AdapterBase,
        engine: Engine,
        hosted: Mapping[str, str],
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._pipeline = pipeline
        self._base = base
        self._engine = engine
        places = getattr(pipeline, "_lora_loadable_modules", ()) if self._specs else ()
        self._hosted = {name: hosted[name] for name in places if name in hosted}
        self._loaded: set[str] = set()
        self._worn: tuple[AdapterChoice, ...] | None = None
        """Unknown where the modules' settings were changed by others."""

    def load(self, names: Iterable[str]) -> None:
        """See to it that these are there; they become active by `wear` alone.

        No forward may be under way. Raises what `adapter_file` and `Engine.changing_adapters` do,
        and `InvalidRequest` for a name that was not registered.
        """
        for name in names:
            if name not in self._specs:
                raise InvalidRequest(f"this model has no adapter {name!r}")
            if name not in self._loaded:
                self._load(self._specs[name])
                self._loaded.add(name)

    def _load(self, spec: AdapterSpec) -> None:
        path = adapter_file(spec, self._base)
        self._worn = None
        own = _own_name(spec.name)
        with (
            self._engine.changing_adapters(*self._hosted.values()),
            _same_gradients(self._modules()),
        ):
            self._pipeline.load_lora_weights(
                str(path.parent),
                weight_name=path.name,
                adapter_name=own,
                local_files_only=True,
                use_safetensors=True,
            )
            if not any(own in _there(module) for module in self._modules()):
                raise InvalidRequest(
                    f"the adapter {spec.name!r} holds nothing for this model",
                    hint="use an adapter that was trained for this model",
                )
            for module in self._modules():
                _cast(module)
            self.wear(())

    def wear(self, chosen: Sequence[AdapterChoice]) -> None:
        """Let these, which are loaded, add their parts with their weights, and no others."""
        if self._worn == tuple(chosen):
            return
        weights = {_own_name(one.name): one.weight for one in chosen}
        for module in self._modules():
            there = _there(module)
            names = [name for name in weights if name in there]
            if names:
                set_weights_and_activate_adapters(module, names, [weights[one] for one in names])
            if there:
                set_adapter_layers(module, enabled=bool(names))
        self._worn = tuple(chosen)

    def look_again(self) -> None:
        """What the model wears may have changed: the next `wear` takes nothing for granted."""
        self._worn = None

    def unload(self) -> None:
        """Take all adapters out of the pipeline, whose components are still on the engine."""
        if not self._loaded:
            return
        with self._engine.changing_adapters(*self._hosted.values()):
            self._pipeline.unload_lora_weights()
        self._loaded.clear()
        self._worn = None

    def _modules(self) -> list[nn.Module]:
        return [getattr(self._pipeline, name) for name in self._hosted]


@contextmanager
def _same_gradients(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let weights that are there require gradients afterwards if they did before.

    peft freezes them. Nobody computes gradients here, but torch folds matrices by that flag, and
    then requests that wear nothing would have other numbers than before.
    """
    before = [(one, one.requires_grad) for module in modules for one in module.parameters()]
    try:
        yield
    finally:
        for parameter, flag in before:
            if parameter.requires_grad != flag:
                parameter.requires_grad = flag


def _own_name(name: str) -> str:
    """What peft calls it: a name that no attribute of its containers has."""
    return f"adapter_{name}"


def _there(module: nn.Module) -> Mapping[str, Any]:
    return getattr(module, "peft_config", None) or {}


def _cast(module: nn.Module) -> None:
    """What diffusers does with `to` after loading, which leaves hosted modules as they are."""
    if not isinstance(module, PreTrainedModel):
        return
    dtype: torch.dtype = module.dtype
    for name, parameter in module.named_parameters():
        if ".lora_" in name and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
