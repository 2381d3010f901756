"""The files of a model's adapters (LoRA), judged from their headers before anything is loaded.

Promises: what passes is one whole safetensors file that holds pairs of LoRA matrices and nothing
else, fitting the model's weights, however its trainer names them. Pickles never pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from offload_protocol.errors import InvalidRequest, ModelLoadFailed
from offloadd.channel.specs import AdapterSpec, ModelSpec
from offloadd.hosting.quantization.gguf_files import is_gguf
from offloadd.hosting.sources.adapter_names import AdapterBase, named_by_layer
from offloadd.hosting.sources.dtypes import is_of_quantised
from offloadd.offload.adapters.adapters import check_pairs
from offloadd.store.index import CheckpointIndex
from offloadd.store.index.weight_file import looking_at, read_weight_file, refuse
from offloadd.store.layout import TensorSpec

_USUAL_NAMES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")

_MATRIX = re.compile(
    r"(?P<component>[^.]+)\.(?P<layer>.+)\.(?:(?P<down>lora_A|lora_down|lora\.down)|"
    r"lora_B|lora_up|lora\.up)\.weight"
)
"""A matrix whose name says of which layer it is."""

_TEXT_MODEL = "text_model."
"""Some versions of transformers have it before the layers of CLIP, others do not."""


def check_adapters(spec: ModelSpec, base: AdapterBase) -> None:
    """Raise for adapters that this model cannot have; see `adapter_file`."""
    if not spec.adapters:
        return
    if not hasattr(base.pipeline_class, "load_lora_weights"):
        raise InvalidRequest(
            f"model {spec.name!r}: {base.pipeline_class.__name__} takes no adapters",
            hint="leave adapters out",
        )
    if any(one.compile for one in (spec.offload, *spec.components.values())):
        raise InvalidRequest(
            f"model {spec.name!r} has both adapters and compile",
            hint="leave compile out: adapters change layers that it has compiled",
        )
    for adapter in spec.adapters:
        adapter_file(adapter, base)


def adapter_file(adapter: AdapterSpec, base: AdapterBase) -> Path:
    """The adapter's file, whose header was read and fits the model.

    Raises `ModelLoadFailed` for a file that is not there, no safetensors file or cut short,
    `InvalidRequest` for one that lacks matrices or is of another model; each names the adapter.
    """
    try:
        path = _find(Path(adapter.source))
        specs = read_weight_file(path).specs
        check_pairs(specs)
        _check_only_pairs(specs)
        _check_shapes(named_by_layer(specs, base), base.checkpoints)
    except (InvalidRequest, ModelLoadFailed) as error:
        raise type(error)(
            f"adapter {adapter.name!r}: {error.message}",
            hint=error.hint,
            details={**error.details, "adapter": adapter.name},
        ) from error
    return path


def _find(source: Path) -> Path:
    with looking_at(source):
        if not source.is_dir():
            if source.suffix == ".safetensors":
                return source
            raise refuse(source, "is no *.safetensors file", "save the adapter as safetensors")
        files = {one.name: one for one in source.iterdir() if one.suffix == ".safetensors"}
    for name in _USUAL_NAMES:
        if name in files:
            return files[name]
    if len(files) != 1:
        raise refuse(
            source,
            f"holds {len(files)} safetensors files, and none called {_USUAL_NAMES[0]}",
            "give the path of the adapter's file; pickles are not taken",
        )
    return next(iter(files.values()))


def _check_only_pairs(names: Iterable[str]) -> None:
    # Diffusers would load these into the base, where every request would see them.
    for name in names:
        if "lora" not in name and not name.endswith(".alpha"):
            raise InvalidRequest(
                f"the tensor `{name}` belongs to no pair of LoRA matrices",
                hint="use an adapter that consists of these alone: others change the model itself",
                details={"tensor": name},
            )


def _check_shapes(specs: Mapping[str, TensorSpec], bases: Mapping[str, CheckpointIndex]) -> None:
    """Compare every matrix with the layer that it is for; the base is [out, in, ...]."""
    # Their files name and shape parts of weights, not layers: whether it fits is seen in loading.
    quantised = {name for name, one in bases.items() if _is_quantised(one)}
    found = 0
    for name, spec in specs.items():
        match = _MATRIX.fullmatch(name)
        if match is None or match["component"] not in bases:
            continue
        if match["component"] in quantised:
            found += 1
            continue
        base = _base_shape(bases[match["component"]], match["layer"])
        if base is None:
            continue
        found += 1
        axis, what = (1, "input") if match["down"] else (0, "output")
        if len(spec.shape) < 2 or len(base) < 2 or spec.shape[axis] != base[axis]:
            raise InvalidRequest(
                f"the adapter does not fit this model: `{name}` has shape {list(spec.shape)}, "
                f"and the {what} of its layer, of shape {list(base)}, is another",
                hint="use an adapter that was trained for this model",
                details={"tensor": name, "expected": list(base), "found": list(spec.shape)},
            )
    if not found:
        raise InvalidRequest(
            "the adapter does not fit this model, which has none of its layers",
            hint="use an adapter that was trained for this model",
        )


def _is_quantised(base: CheckpointIndex) -> bool:
    return is_gguf(base.location) or any(is_of_quantised(name) for name in base.tensors)


def _base_shape(base: CheckpointIndex, layer: str) -> tuple[int, ...] | None:
    bare = layer.removeprefix(_TEXT_MODEL)
    for path in (layer, bare, _TEXT_MODEL + bare):
        place = base.tensors.get(f"{path}.weight")
        if place is not None:
            return place.spec.shape
    return None
