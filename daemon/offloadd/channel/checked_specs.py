"""From what people write of a model to its spec, with every key checked.

The one place for the keys of a `[[models]]` entry and of `load`'s options.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from offload_protocol.errors import InvalidRequest
from offload_protocol.sizes import parse_duration_s, parse_size_bytes
from offloadd.channel.specs import AdapterSpec, ModelSpec, OffloadMode, OffloadSpec

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
