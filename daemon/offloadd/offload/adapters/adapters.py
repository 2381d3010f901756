"""Adapters (LoRA) beside a hosted module's weights: where theirs live, and how a change is undone.

Promises: loading, switching and deleting adapters reads, moves, groups and pins no base weight;
what adapters take of the device is counted against its budget, and given back when they go; a
change that fails leaves the module exactly as it was.

Adapter layers wrap the hosted layers, whose objects stay: hooks and bindings are on those objects,
so nothing has to be told where they moved. Whatever tensor of the module is not a weight or buffer
that the engine took over belongs to an adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from offload_protocol.errors import InvalidRequest, ModelLoadFailed
from offloadd.offload.grouping.ties import dotted
from offloadd.offload.streaming.tier import DeviceTier, Region
from offloadd.offload.weights.absent import AbsentWeight
from offloadd.offload.weights.forms import form_of
from offloadd.store.layout import align

Own = set[tuple[int, str]]
"""What the engine took over: (id of the module object, attribute)."""

_UNFIT = (
    *(RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError),
    *(OSError, ImportError, SafetensorError),
)
"""What peft, diffusers and transformers raise for adapters that do not fit, as seen in them."""

_DEVICE_FAULTS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""RuntimeErrors that say nothing about the adapter."""

_PAIRS = (("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora.down", "lora.up"))
"""How the two matrices of one layer are called in adapter files."""

_TENSORS = ("_parameters", "_buffers")
"""Dictionaries of a module whose values the engine itself exchanges."""

_PLAIN_CONTAINERS = (dict, OrderedDict, list, set)
"""Subclasses (a frozen configuration) are nobody's to refill."""

_Container = dict[Any, Any] | list[Any] | set[Any]


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A tensor of an adapter, with the name that errors call it by."""

    name: str
    tensor: torch.Tensor

    @property
    def storage(self) -> int:
        return self.tensor.untyped_storage().data_ptr()


class AdapterMemory:
    """The device memory of one module's adapters."""

    def __init__(self, tier: DeviceTier) -> None:
        self._tier = tier
        self._regions: dict[int, Region] = {}

    @property
    def size_bytes(self) -> int:
        """What adapters take of the budget."""
        return sum(region.size_bytes for region in self._regions.values())

    def sweep(self, module: nn.Module, own: Own) -> int:
        """Give back the memory of adapters that are gone; says how many bytes that were."""
        before_bytes = self.size_bytes
        live = {one.storage for one in _foreign(module, own)}
        for storage in [storage for storage in self._regions if storage not in live]:
            self._tier.release(self._regions.pop(storage))
        return before_bytes - self.size_bytes

    def missing_bytes(self, module: nn.Module, own: Own) -> int:
        """What `take` will allocate."""
        return sum(_room_bytes(one) for one in self._missing(module, own))

    def take(self, module: nn.Module, own: Own) -> None:
        """Move every adapter tensor into memory that is counted.

        Raises ModelLoadFailed for one without values or of a subclass, OutOfMemory when the budget
        or the device has no room; then none was moved.
        """
        missing = self._missing(module, own)
        total_bytes = sum(_room_bytes(one) for one in missing)
        if not total_bytes:
            return
        region = self._tier.allocate(total_bytes)
        self._regions[region.tensor.untyped_storage().data_ptr()] = region
        cursor = 0
        with torch.inference_mode(False), torch.no_grad():
            for one in missing:
                form = form_of(one.tensor)
                assert form is not None  # `_missing` refused what has none
                if form.size_bytes:
                    place = form.over(region.tensor[cursor : cursor + form.size_bytes])
                    place.copy_(one.tensor)
                    one.tensor.data = place
                cursor += _room_bytes(one)
        self.sweep(module, own)

    def close(self, module: nn.Module | None, own: Own) -> None:
        """Give all memory back; adapters that are still there go on in host memory."""
        for one in _foreign(module, own) if module is not None else ():
            if one.storage in self._regions:
                one.tensor.data = one.tensor.detach().to("cpu", copy=True)
        for region in self._regions.values():
            self._tier.release(region)
        self._regions.clear()

    def _missing(self, module: nn.Module, own: Own) -> list[_Foreign]:
        """What is not in counted memory, or in memory that is half empty by now."""
        everything = _foreign(module, own)
        live_bytes = dict.fromkeys(self._regions, 0)
        for one in everything:
            _check(one)
            if one.storage in live_bytes:
                live_bytes[one.storage] += _room_bytes(one)
        whole = {
            storage
            for storage, region in self._regions.items()
            if live_bytes[storage] == region.size_bytes
        }
        return [one for one in everything if one.storage not in whole]


@contextmanager
def rolled_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Undo what the block did to the modules' structure if it raises.

    Children and plain attributes of every module come back, so that wrapped layers are unwrapped
    and adapter settings forgotten; values of tensors do not. What libraries raise for an adapter
    that does not fit becomes InvalidRequest; coded errors and faults of the device pass through.
    """
    before = [_state(child) for module in modules for child in module.modules()]
    try:
        yield
    except BaseException as error:
        for state in before:
            _restore(*state)
        if isinstance(error, _UNFIT) and not isinstance(error, _DEVICE_FAULTS):
            raise InvalidRequest(
                f"the adapter does not fit this model: {_sentence(error)}",
                hint="use an adapter that was trained for this model, and download it again if "
                "its file is damaged",
                details={"error": type(error).__name__},
            ) from error
        raise


def check_pairs(names: Iterable[str]) -> None:
    """Raise InvalidRequest for an adapter file that lacks one of two matrices of a layer.

    `names` are the file's tensors. The libraries only warn, and multiply with random numbers.
    """
    there = set(names)
    for name in sorted(there):
        for half, other in _PAIRS:
            for this, that in ((half, other), (other, half)):
                if f".{this}." in name and name.replace(f".{this}.", f".{that}.") not in there:
                    if name.endswith(".bias"):
                        continue  # only the second matrix ever has one
                    raise InvalidRequest(
                        f"the adapter has `{name}`, but not the `{that}` that belongs to it",
                        hint="download the adapter again; its file is incomplete",
                        details={"tensor": name},
                    )


def _foreign(module: nn.Module, own: Own) -> list[_Foreign]:
    """Every tensor that the engine did not take over, once."""
    found: dict[int, _Foreign] = {}
    for path, child in module.named_modules():
        for attribute, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is None or (id(child), attribute) in own or isinstance(tensor, AbsentWeight):
                continue
            found.setdefault(id(tensor), _Foreign(dotted(path, attribute), tensor))
    return list(found.values())


def _check(one: _Foreign) -> None:
    plain = type(one.tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    if one.tensor.is_meta or not plain or form_of(one.tensor) is None:
        why = "has no values" if one.tensor.is_meta else "is of a kind that cannot be moved"
        raise ModelLoadFailed(
            f"The adapter's tensor `{one.name}` {why}.",
            hint="use an adapter whose file holds all of its weights, unquantised",
            details={"tensor": one.name},
        )


def _room_bytes(one: _Foreign) -> int:
    return align(one.tensor.numel() * one.tensor.element_size())


def _state(module: nn.Module) -> tuple[nn.Module, dict[str, Any], dict[str, _Container]]:
    """A module, its attributes, and what the containers among them hold."""
    attributes = dict(vars(module))
    contents = {
        name: value.copy() for name, value in attributes.items() if type(value) in _PLAIN_CONTAINERS
    }
    return module, attributes, contents


def _restore(
    module: nn.Module, attributes: dict[str, Any], contents: dict[str, _Container]
) -> None:
    now = vars(module)
    for name in [name for name in now if name not in attributes]:
        del now[name]
    now.update(attributes)
    for name, content in contents.items():
        # The container itself may be held elsewhere (whoever removes a hook does).
        _refill(attributes[name], content, keep_values=name in _TENSORS)


def _refill(container: Any, content: Any, *, keep_values: bool) -> None:
    if isinstance(container, dict):
        values = {**content, **container} if keep_values else content
        refilled = {key: values[key] for key in content}
        container.clear()
        container.update(refilled)
    elif isinstance(container, set):
        container.clear()
        container.update(content)
    else:
        container[:] = content


def _sentence(error: BaseException) -> str:
    """What went wrong first: the libraries stumble again while they clean up."""
    while isinstance(error.__context__, _UNFIT):
        error = error.__context__
    return " ".join(str(error).split())[:500] or type(error).__name__
