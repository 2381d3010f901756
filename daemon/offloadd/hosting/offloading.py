"""Applies a plan to a pipeline with the offloading of diffusers and accelerate, and undoes it.

`none`, `model`, `sequential` and `group` each give the picture that `none` gives, on a CPU as well,
where moving is free and the rest on disk is real. This is the seam beneath which another engine
can be put: `apply_plan`, and the three methods of what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import apply_group_offloading
from torch import nn

from offload_protocol.errors import InvalidRequest
from offloadd.channel.specs import OffloadSpec
from offloadd.hosting.disk_rest import DiskRest, disk_error
from offloadd.hosting.group_hooks import (
    forget_hooks,
    keep_direct_tensors,
    offload_groups,
    separate_ties,
)
from offloadd.hosting.loading import modules
from offloadd.hosting.moves import MoveCounter
from offloadd.hosting.offload_plan import Plan

_HOST = torch.device("cpu")
_DEFAULT_BLOCKS_PER_GROUP = 1


class Placement:
    """What was done to a pipeline; every weight of it is where the plan says between jobs."""

    def __init__(self, pipeline: Any, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self._device = device
        self._modules = modules(pipeline)
        self._model_hooks: list[Any] = []
        self._disks: dict[str, DiskRest] = {}
        self.moves = MoveCounter()

    @property
    def needs_settling(self) -> bool:
        """Whether weights stay on the device after a job that ended well."""
        return bool(self._model_hooks)

    def settle(self) -> None:
        """Bring every weight back to where it rests, whatever the last job left behind."""
        for hook in self._model_hooks:
            hook.offload()
        for name, offload in self.plan.items():
            if offload.mode == "group":
                offload_groups(self._modules[name])
            elif offload.mode == "sequential":
                _settle_sequential(self._modules[name])

    def remove(self) -> None:
        """Take all hooks off and delete what rests on disk; the pipeline cannot be used after."""
        for module in self._modules.values():
            remove_hook_from_module(module, recurse=True)
            forget_hooks(module)
        for disk in self._disks.values():
            disk.remove()
        self._modules.clear()
        self._model_hooks.clear()
        self._disks.clear()

    def resident_bytes(self, name: str) -> int:
        """Bytes of a component's weights that are on the device now."""
        if self.plan[name].mode in ("sequential", "group") and self._device == _HOST:
            # On a CPU such weights have the device's name while they rest.
            return 0
        module = self._modules[name]
        saved = module.state_dict().keys()
        tensors = [*module.named_parameters(), *module.named_buffers()]
        return sum(
            one.nbytes for key, one in tensors if key in saved and one.device == self._device
        )

    def disk(self, path: Path) -> DiskRest:
        """The one directory of this placement below `path`."""
        if str(path) not in self._disks:
            self._disks[str(path)] = DiskRest(path)
        return self._disks[str(path)]

    def chain_models(self, names: list[str]) -> None:
        """Let each of these components leave the device when the next one needs it."""
        previous = None
        for name in names:
            _, user_hook = cpu_offload_with_hook(self._modules[name], self._device, previous)
            self._model_hooks.append(user_hook)
            self.moves.count_model(user_hook.hook, self._modules[name], self._device)
            previous = user_hook


def apply_plan(pipeline: Any, plan: Plan, device: torch.device) -> Placement:
    """Place each component as the plan says.

    Raises `InvalidRequest` for what a component cannot have, `StorageFailed` for a disk that
    cannot take it; nothing is left behind then.
    """
    placement = Placement(pipeline, plan, device)
    parts = modules(pipeline)
    with ExitStack() as undo:
        undo.callback(placement.remove)
        for name, offload in plan.items():
            _APPLY[offload.mode](placement, name, parts[name], offload, device)
        placement.chain_models(_in_calling_order(pipeline, plan))
        undo.pop_all()
    return placement


def _in_calling_order(pipeline: Any, plan: Plan) -> list[str]:
    order = (getattr(pipeline, "model_cpu_offload_seq", None) or "").split("->")
    named = [name for name in plan if plan[name].mode == "model"]
    return sorted(named, key=lambda name: order.index(name) if name in order else len(order))


def _apply_none(
    _: Placement, name: str, module: nn.Module, offload: OffloadSpec, device: torch.device
) -> None:
    module.to(device)


def _apply_model(
    _: Placement, name: str, module: nn.Module, offload: OffloadSpec, device: torch.device
) -> None:
    """Nothing here: the components of this mode are chained once all are known."""


def _apply_sequential(
    placement: Placement, name: str, module: nn.Module, offload: OffloadSpec, device: torch.device
) -> None:
    # As the pipelines of diffusers do it: a model with weights of its own at the top is moved with
    # its buffers.
    cpu_offload(module, device, offload_buffers=len(module._parameters) > 0)
    if device != _HOST:
        placement.moves.count_sequential(module)


def _apply_group(
    placement: Placement, name: str, module: nn.Module, offload: OffloadSpec, device: torch.device
) -> None:
    if not getattr(module, "_supports_group_offloading", True):
        raise InvalidRequest(
            f"component {name!r} ({type(module).__name__}) cannot be offloaded by groups",
            hint=f'set another mode for it, for example components.{name} = "model"',
        )
    parameters = offload.group_parameters()
    if offload.offload_type != "leaf_level":
        parameters.setdefault("num_blocks_per_group", _DEFAULT_BLOCKS_PER_GROUP)
    _check_blocks(name, module, parameters.get("block_modules"))
    if offload.offload_to_disk_path is not None:
        size_bytes = sum(tensor.nbytes for tensor in module.state_dict().values())
        path = Path(offload.offload_to_disk_path)
        parameters["offload_to_disk_path"] = str(placement.disk(path).component(name, size_bytes))
        separate_ties(module)
    direct = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers())}
    kept = {key: tensor.data.to(device) for key, tensor in direct.items()}
    try:
        apply_group_offloading(module, onload_device=device, offload_device=_HOST, **parameters)
    except OSError as error:
        raise disk_error(Path(offload.offload_to_disk_path or "/"), error) from error
    keep_direct_tensors(module, {id(direct[key]): kept[key] for key in direct})
    if device != _HOST or offload.offload_to_disk_path is not None:
        placement.moves.count_groups(module)


def _check_blocks(name: str, module: nn.Module, blocks: list[str] | None) -> None:
    children = dict(module.named_children())
    if unknown := [block for block in blocks or () if block not in children]:
        raise InvalidRequest(
            f"component {name!r} has no module {unknown[0]!r} to treat as a block",
            hint=f"its modules are: {', '.join(children)}",
        )


def _settle_sequential(module: nn.Module) -> None:
    # An exception skips the hook that puts a layer's weights away again.
    for layer in module.modules():
        hook = getattr(layer, "_hf_hook", None)
        if hook is not None and any(not one.is_meta for one in layer.parameters(recurse=False)):
            hook.post_forward(layer, ())


_APPLY: dict[str, Callable[[Placement, str, nn.Module, OffloadSpec, torch.device], None]] = {
    "none": _apply_none,
    "model": _apply_model,
    "sequential": _apply_sequential,
    "group": _apply_group,
}
