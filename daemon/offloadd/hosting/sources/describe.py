"""What a model is and how its weights will be kept, found out without loading any of them."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from offload_protocol.errors import OutOfMemory
from offload_protocol.records import ComponentInfo
from offload_protocol.sizes import format_size, parse_size_bytes
from offloadd.channel.messages import ModelDescribed, ParameterInfo
from offloadd.channel.specs import ModelSpec
from offloadd.hosting.placing.auto import choose_offload
from offloadd.hosting.placing.offload_plan import Plan, check_settings, make_plan, setting_notes
from offloadd.hosting.quantization.components import check_quantised, quantised_bytes
from offloadd.hosting.quantization.gguf_files import is_gguf
from offloadd.hosting.sources.adapter_files import check_adapters
from offloadd.hosting.sources.adapter_names import AdapterBase
from offloadd.hosting.sources.classes import component_class, pipeline_class
from offloadd.hosting.sources.component_config import read_config
from offloadd.hosting.sources.dtypes import choose_dtype, dtype_name, loaded_bytes
from offloadd.hosting.sources.pipeline_files import Finder
from offloadd.hosting.sources.signatures import Parameter, call_parameters
from offloadd.hosting.sources.tasks import check_components, class_for_task
from offloadd.store.index import ComponentFiles, PipelineFiles
from offloadd.store.index.pipeline import Recall, Unpickle, nothing_recalled

_log = logging.getLogger(__name__)

_DEFAULT_MULTIPLE = 8
"""What the pipelines of diffusers demand whatever their autoencoder does."""


@dataclass(frozen=True, slots=True)
class Description:
    """A checked model: its files, its dtype, what its call takes, its components' loaded bytes."""

    spec: ModelSpec
    files: PipelineFiles
    dtype: torch.dtype
    parameters: Mapping[str, Parameter]
    takes_generator: bool
    size_multiple: int
    component_bytes: Mapping[str, int]

    def budget_bytes(self, device_bytes: int) -> int | None:
        """What its weights may take of a device of that size; None where nobody said."""
        budget = self.spec.device_budget
        return None if budget is None else parse_size_bytes(budget, whole_bytes=device_bytes)

    @property
    def adapter_base(self) -> AdapterBase:
        """What its adapters are for."""
        return _adapter_base(self.files)

    def plan(self, free_device_bytes: int, device_bytes: int, on_cpu: bool) -> Plan:
        """How each component is to be offloaded, given what is free of the device now.

        Raises `OutOfMemory` if everything is to stay on the device and does not fit its budget.
        """
        budget_bytes = self.budget_bytes(device_bytes)
        auto = choose_offload(self.component_bytes, free_device_bytes, budget_bytes, on_cpu)
        plan = make_plan(self.spec, self.component_bytes, auto)
        staying = sum(self.component_bytes[name] for name in plan if plan[name].mode == "none")
        if budget_bytes is not None and staying > budget_bytes:
            raise OutOfMemory(
                f"model {self.spec.name!r} is to stay on the device whole, which takes "
                f"{format_size(staying)}, and its device_budget is {format_size(budget_bytes)}",
                hint='host it with offload = "stream"',
                details={"needed_bytes": staying, "budget_bytes": budget_bytes},
            )
        return plan

    def message(self) -> ModelDescribed:
        """The answer to `Register`."""
        return ModelDescribed(
            name=self.spec.name,
            pipeline=self.files.class_name,
            dtype=dtype_name(self.dtype),
            offload=self.spec.offload.mode,
            components=[
                msgspec.structs.replace(self.found(one), offload=self._offload_name(one.name))
                for one in self.files.components
            ],
            parameters=[
                ParameterInfo(
                    name=one.name,
                    kinds=list(one.kinds),
                    required=one.required,
                    items=list(one.items),
                )
                for one in self.parameters.values()
            ],
            size_multiple=self.size_multiple,
            notes=setting_notes(self.spec),
        )

    def found(self, one: ComponentFiles) -> ComponentInfo:
        """What was found of a component: its class, its bytes once loaded, its weight files."""
        index = one.checkpoint
        return ComponentInfo(
            name=one.name,
            kind=one.class_name,
            bytes=self.component_bytes.get(one.name, 0),
            files=[file.path.name for file in index.files] if index else [],
            variant=(index.variant or "") if index else "",
        )

    def _offload_name(self, component: str) -> str:
        if component not in self.component_bytes:
            return ""
        return self.spec.own_offloads.get(component, self.spec.offload).mode


def describe(
    spec: ModelSpec,
    on_cpu: bool,
    recall: Recall = nothing_recalled,
    unpickle: Unpickle = nothing_recalled,
) -> Description:
    """Find and check a model's files, classes and settings.

    Where weight files are gone, `recall` may know their weights in memory; where there are only
    pickles and the model may have those, `unpickle` rewrites them. Raises
    `ModelLoadFailed` for a source that cannot be hosted, `InvalidRequest` for settings that do not
    fit the model or the device, `StorageFailed` for a disk that cannot be read.
    """
    files = Finder(recall, unpickle).find(spec)
    if (class_name := _class_name(spec, files)) != files.class_name:
        check_components(class_name, [one.name for one in files.components])
        files = replace(files, class_name=class_name)
    kind = pipeline_class(files.class_name)
    for component in files.components:
        component_class(component.name, component.library, component.class_name)
    weighty = {one.name: one.checkpoint for one in files.components if one.checkpoint is not None}
    check_settings(spec, weighty)
    quantised = check_quantised(spec, files)
    check_adapters(spec, _adapter_base(files))
    for note in setting_notes(spec):
        _log.warning("model=%s: %s", spec.name, note)
    plain = [one for one in weighty.values() if not is_gguf(one.location)]
    dtype = choose_dtype(spec.dtype, plain or weighty.values(), on_cpu)
    return Description(
        spec=spec,
        files=files,
        dtype=dtype,
        parameters=call_parameters(kind),
        takes_generator="generator" in inspect.signature(kind.__call__).parameters,
        size_multiple=_size_multiple(files),
        component_bytes={name: loaded_bytes(one, dtype) for name, one in weighty.items()}
        | quantised_bytes(spec, files, quantised, dtype),
    )


def _adapter_base(files: PipelineFiles) -> AdapterBase:
    parts = {one.name: one for one in files.components if one.checkpoint is not None}
    return AdapterBase(
        pipeline_class(files.class_name),
        {name: one.checkpoint for name, one in parts.items() if one.checkpoint is not None},
        read_config(parts["unet"].directory) if "unet" in parts else {},
    )


def _class_name(spec: ModelSpec, files: PipelineFiles) -> str:
    if spec.task is not None:
        return class_for_task(files.class_name, spec.task)
    return spec.pipeline or files.class_name


def _size_multiple(files: PipelineFiles) -> int:
    configs = {one.name: read_config(one.directory) for one in files.components if one.checkpoint}
    autoencoder = configs.get("vae") or configs.get("vqvae") or configs.get("movq") or {}
    factor = _shrinking(autoencoder)
    patch = configs.get("transformer", {}).get("patch_size") or 1
    # Flux and its kin write 1 there and pack 2 x 2 latents into one token themselves.
    packs = files.class_name.startswith(("Flux", "QwenImage", "Chroma")) and patch == 1
    patch = 2 if packs else patch
    return math.lcm(_DEFAULT_MULTIPLE, factor * (patch if isinstance(patch, int) else 1))


def _shrinking(autoencoder: Mapping[str, Any]) -> int:
    for name in ("scale_factor_spatial", "spatial_compression_ratio"):
        if isinstance(autoencoder.get(name), int):
            return int(autoencoder[name])
    for name in ("block_out_channels", "encoder_block_out_channels", "dim_mult"):
        widths = autoencoder.get(name)
        if isinstance(widths, list) and 1 <= len(widths) <= 10:
            return int(2 ** (len(widths) - 1))
    return 1
