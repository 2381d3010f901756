"""Corrections to the group hooks of diffusers, so that every weight is right whenever it is read.

The hooks cover the forward of modules. What is read outside a forward, or owned by two groups, is
taken out of their hands here; and what an exception left on the device is put away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_HOOK = "group_offloading"
_REGISTRY = "_diffusers_hook"


def offload_groups(module: nn.Module) -> None:
    """Offload every group that an exception may have left on the device."""
    for group in groups(module):
        group.offload_()


def keep_direct_tensors(module: nn.Module, kept: Mapping[int, torch.Tensor]) -> None:
    """Take tensors out of all groups and leave them on the device with the values in `kept`.

    `kept` maps the id of a parameter or buffer to its values. Helpers of a model read such tensors
    after its forward, when a group's would be on the host already, or be emptied for the disk.
    """
    for group in groups(module):
        group.parameters = [one for one in group.parameters if id(one) not in kept]
        group.buffers = [one for one in group.buffers if id(one) not in kept]
        if group.offload_to_disk_path is not None:
            group.tensor_to_key = _without(group.tensor_to_key, kept)
            group.key_to_tensor = {key: one for one, key in group.tensor_to_key.items()}
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) in kept:
            tensor.data = kept[id(tensor)]


def separate_ties(module: nn.Module) -> None:
    """Give each module that shares a parameter one of its own with the same values.

    A group on disk empties its tensors when it is put away, under the eyes of whoever shares them.
    """
    seen: set[int] = set()
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            memory = parameter.untyped_storage().data_ptr()
            if memory in seen and parameter.numel():
                copy = nn.Parameter(parameter.data.clone(), parameter.requires_grad)
                setattr(owner, name, copy)
            seen.add(memory)


def forget_hooks(module: nn.Module) -> None:
    """Cut the hooks' references to modules and groups, which form cycles with them."""
    for layer in module.modules():
        registry = layer.__dict__.pop(_REGISTRY, None)
        if registry is not None:
            registry.hooks.clear()
            registry._fn_refs.clear()
            registry._module_ref = None
            layer.__dict__.pop("forward", None)


def groups(module: nn.Module) -> Iterator[Any]:
    """The groups into which diffusers has put the weights of a module, each once."""
    seen: set[int] = set()
    for layer in module.modules():
        registry = getattr(layer, _REGISTRY, None)
        hook = registry.get_hook(_HOOK) if registry is not None else None
        if hook is not None and id(hook.group) not in seen:
            seen.add(id(hook.group))
            yield hook.group


def _without(
    keys: Mapping[torch.Tensor, str], kept: Mapping[int, torch.Tensor]
) -> dict[torch.Tensor, str]:
    return {tensor: key for tensor, key in keys.items() if id(tensor) not in kept}
