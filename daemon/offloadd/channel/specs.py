"""What a worker is told to host: a model's source and how its weights are to be offloaded.

`model_spec` is the one place that checks the keys of a `[[models]]` entry and of `load`'s options.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from offload_protocol.errors import InvalidRequest
from offload_protocol.sizes import parse_duration_s, parse_size_bytes

OffloadMode = Literal["auto", "none", "stream", "model", "sequential", "group"]
Task = Literal[
    "text-to-image",
    "image-to-image",
    "inpainting",
    "text-to-video",
    "image-to-video",
    "video-to-video",
]


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What weights are quantised to when a model is loaded, and which are left alone."""

    type: Literal["int8", "float8"]
    skip: list[str] = []
    """Parts of module paths, as the library's `modules_to_not_convert`."""


class OffloadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one component, or a whole pipeline, is offloaded.

    The parameters below `mode` belong to `group` and are named as in
    `diffusers.hooks.apply_group_offloading`; those in `NOTHING_TO_CHOOSE` are taken and change
    nothing. What rests in `offload_to_disk_path` is a pack, and only where the model's own files
    cannot be read as they are.
    """

    mode: OffloadMode = "auto"
    storage_dtype: Literal["float8_e4m3fn", "float8_e5m2"] | None = None
    """What large layers are stored and moved in; they are cast back for each use."""
    storage_skip: list[str] | None = None
    """Regular expressions searched for in module paths: what `storage_dtype` leaves alone."""
    quantization: QuantizationSpec | None = None
    """What linear layers are quantised to when it is loaded; they compute with it as it is."""
    tiling: bool = False
    """An autoencoder decodes in overlapping tiles."""
    slicing: bool = False
    """An autoencoder decodes one picture of a batch at a time."""
    channels_last: bool = False
    """Weights of four dimensions lie channels last."""
    attention_backend: str | None = None
    """What computes attention, by its name in diffusers."""
    compile: Literal["regional"] | None = None
    """Whether blocks that repeat are compiled by torch."""
    offload_type: Literal["block_level", "leaf_level"] | None = None
    num_blocks_per_group: int | None = None
    non_blocking: bool | None = None
    use_stream: bool | None = None
    record_stream: bool | None = None
    low_cpu_mem_usage: bool | None = None
    offload_to_disk_path: str | None = None
    block_modules: list[str] | None = None
    exclude_kwargs: list[str] | None = None

    def group_parameters(self) -> dict[str, Any]:
        """The parameters of `group` that were set, by their names in diffusers."""
        return {
            name: value
            for name in self.__struct_fields__
            if name in GROUP_PARAMETERS and (value := getattr(self, name)) is not None
        }


class ComponentSpec(OffloadSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One component: how it is offloaded, and where its weights are if not in the model's source.

    `source` is a safetensors file, in the layout of diffusers or of the model's authors, or the
    directory of a component.
    """

    source: str | None = None

    @property
    def is_only_a_source(self) -> bool:
        """Whether it leaves everything but its source to the model's settings."""
        return self.source is not None and self == ComponentSpec(source=self.source)


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter that requests may name: a safetensors file of LoRA matrices, or its directory."""

    name: str
    source: str


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hosted model.

    `source` is a directory with `model_index.json`, the name of one in the hub cache, a single-file
    checkpoint, or `builtin:shapes`.
    """

    name: str
    source: str
    config: str | None = None
    """The directory of configurations that goes with a single-file checkpoint, as a source."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    variant: str | None = None
    revision: str | None = None
    """The branch, tag or commit of a model in the hub cache; None: main."""
    task: Task | None = None
    """What it is for, if not what it was saved for; the weights are the same."""
    pipeline: str | None = None
    """The class of diffusers that draws, in place of the one that it was saved as."""
    offload: OffloadSpec = OffloadSpec()
    components: dict[str, ComponentSpec] = {}
    """Settings for single components, by name; the others follow `offload`."""
    device_budget: str | None = None
    """What its weights may take of the device at once: a size, or a share such as `50%`."""
    adapters: list[AdapterSpec] = []
    """What a request's `adapters` may name; each is loaded when first asked for."""
    weights_only: bool = False
    """Whether weights that are only there as pickles are taken, as torch's `weights_only` does."""
    reuse_embeddings: bool = True
    """Whether its text encoders may answer from what they gave before (`hosting.embeddings`)."""
    preload: bool = False
    keep_alive: float | None = None
    """Seconds that it stays in memory unused; below 0 for ever; None: as the daemon has it."""

    @property
    def own_offloads(self) -> dict[str, OffloadSpec]:
        """The components that do not follow `offload`, with their settings."""
        return {name: one for name, one in self.components.items() if not one.is_only_a_source}

    @property
    def names_files(self) -> bool:
        """Whether it names any place on this machine, or a model in the hub cache."""
        places = [self.config, self.offload.offload_to_disk_path]
        for one in self.components.values():
            places += [one.source, one.offload_to_disk_path]
        return not self.source.startswith("builtin:") or bool(self.adapters) or any(places)


FEATURES = ("tiling", "slicing", "channels_last", "attention_backend", "compile")
"""The settings of `OffloadSpec` that change how a module computes."""

GROUP_PARAMETERS = (
    "offload_type",
    "num_blocks_per_group",
    "non_blocking",
    "use_stream",
    "record_stream",
    "low_cpu_mem_usage",
    "offload_to_disk_path",
    "block_modules",
    "exclude_kwargs",
)
"""The settings of `OffloadSpec` that belong to `group`."""

NOTHING_TO_CHOOSE = frozenset(
    {"non_blocking", "use_stream", "record_stream", "low_cpu_mem_usage", "exclude_kwargs"}
)
"""Parameters of `group` that leave the offload engine nothing to choose.

It always copies beside the computation, from memory that is page-locked in place, ordered by
events, and never touches a module's arguments.
"""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""The name of a model on the hub."""

_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}", re.ASCII)
_BELOW_ZERO = re.compile(r"-\d+(\.\d*)?")
_SEVERAL_DEVICES = {"device_map", "max_memory"}
_GROUP_ONLY = "belongs to `group`"


def model_spec(name: str, source: str, options: dict[str, Any]) -> ModelSpec:
    """Check `options` (keys as in a `[[models]]` entry) and give the spec.

    `offload` may be a mode's name or a map with `mode` and its parameters; so may each entry of
    `components`. Raises `InvalidRequest` that names the key.
    """
    if not 1 <= len(name) <= 200 or not name.isprintable() or " " in name:
        raise InvalidRequest(
            f"{name[:200]!r} is not a model name",
            hint="use 1 to 200 printable characters without spaces",
        )
    for key in _SEVERAL_DEVICES & options.keys():
        raise InvalidRequest(
            f"model {name!r}: {key} spreads a model over several devices, and a worker has one",
            hint="leave it out; device_budget bounds what the model takes of the device",
        )
    data = dict(options, name=name, source=source)
    _check_modes(name, data)
    if "keep_alive" in data:
        data["keep_alive"] = keep_alive_s(data["keep_alive"])
    if isinstance(data.get("device_budget"), int):
        data["device_budget"] = str(data["device_budget"])
    if "offload" in data:
        data["offload"] = _offload_data(data["offload"])
    if isinstance(data.get("components"), dict):
        data["components"] = {key: _offload_data(item) for key, item in data["components"].items()}
    try:
        spec = msgspec.convert(data, ModelSpec)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"model {name!r} has a setting that is not known or not of its type: {error}",
            hint=f"known keys: {', '.join(ModelSpec.__struct_fields__)}",
        ) from None
    for place, offload in [("offload", spec.offload), *spec.components.items()]:
        _check_offload(name, place, offload)
    _check_adapters(name, spec.adapters)
    _check_places(spec)
    if spec.task is not None and spec.pipeline is not None:
        raise InvalidRequest(
            f"model {name!r} has both a task and a pipeline",
            hint="leave one of them out: the task chooses the pipeline",
        )
    if spec.device_budget is not None:
        try:
            parse_size_bytes(spec.device_budget, whole_bytes=0)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"model {name!r}: device_budget: {error.message}", hint=error.hint
            ) from None
    return spec


def keep_alive_s(value: Any) -> float:
    """Seconds from a duration such as `5m`, from `forever`, or from a number, below 0 for ever.

    Raises `InvalidRequest` for anything else.
    """
    if value == "forever" or (isinstance(value, str) and _BELOW_ZERO.fullmatch(value)):
        return -1.0
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        return -1.0
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidRequest(f"{value!r} is no time to keep a model", hint="write 5m, 0 or forever")
    return parse_duration_s(value)


def _offload_data(value: Any) -> Any:
    if isinstance(value, str):
        return {"mode": value}
    if isinstance(value, Mapping) and isinstance(value.get("quantization"), str):
        return {**value, "quantization": {"type": value["quantization"]}}
    return value


def _check_modes(name: str, data: Mapping[str, Any]) -> None:
    of_components = data.get("components")
    places = {"offload": data.get("offload")}
    if isinstance(of_components, Mapping):
        places |= {f"components.{key}": value for key, value in of_components.items()}
    modes = get_args(OffloadMode)
    for place, value in places.items():
        mode = value.get("mode") if isinstance(value, Mapping) else value
        if isinstance(mode, str) and mode not in modes:
            near = difflib.get_close_matches(mode, modes, n=1)
            raise InvalidRequest(
                f"model {name!r}: {place} is {mode[:80]!r}, which is no mode",
                hint=f"did you mean {near[0]!r}?" if near else f"the modes are {', '.join(modes)}",
            )


def _check_adapters(name: str, adapters: Sequence[AdapterSpec]) -> None:
    seen: set[str] = set()
    for one in adapters:
        if not _ADAPTER_NAME.fullmatch(one.name):
            raise InvalidRequest(
                f"model {name!r}: {one.name[:200]!r} is not the name of an adapter",
                hint="use 1 to 100 letters, digits, - and _",
            )
        if one.name in seen:
            raise InvalidRequest(f"model {name!r} has two adapters named {one.name!r}")
        seen.add(one.name)
        _check_absolute(name, f"the source of adapter {one.name!r}", one.source)


def _check_places(spec: ModelSpec) -> None:
    if spec.config is not None and not HUB_ID.fullmatch(spec.config):
        _check_absolute(spec.name, "config", spec.config)
    for name, one in spec.components.items():
        if one.source is not None:
            _check_absolute(spec.name, f"the source of component {name!r}", one.source)


def _check_absolute(model: str, what: str, path: str) -> None:
    if not Path(path).is_absolute():
        raise InvalidRequest(
            f"model {model!r}: {what} is {path[:200]!r}, not an absolute path",
            hint="the daemon has another working directory; give the path from the root",
        )


def _check_offload(name: str, place: str, offload: OffloadSpec) -> None:
    parameters = offload.group_parameters()
    if parameters and offload.mode != "group":
        raise InvalidRequest(
            f"model {name!r}: {', '.join(parameters)} of {place} {_GROUP_ONLY}, "
            f"not to {offload.mode!r}",
            hint='set mode = "group" beside it',
        )
    if offload.storage_skip is not None and offload.storage_dtype is None:
        raise InvalidRequest(
            f"model {name!r}: storage_skip of {place} needs storage_dtype",
            hint="set storage_dtype, or leave storage_skip out",
        )
    if offload.quantization is not None and offload.storage_dtype is not None:
        raise InvalidRequest(
            f"model {name!r}: quantization and storage_dtype of {place} both say what weights are "
            "stored in",
            hint="leave one of them out",
        )
    if offload.num_blocks_per_group is not None and offload.num_blocks_per_group < 1:
        raise InvalidRequest(f"model {name!r}: num_blocks_per_group of {place} is below 1")
    if offload.record_stream and not offload.use_stream:
        raise InvalidRequest(
            f"model {name!r}: record_stream of {place} needs use_stream",
            hint="set use_stream = true, or leave record_stream out",
        )
