"""Which of a model's components are quantised, by its settings or as they were saved.

Promises: what cannot be hosted is refused before anything is loaded, with the component and what
can be done; sizes are those of the weights as they will be stored, to the byte.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from offload_protocol.errors import InvalidRequest
from offloadd.channel.specs import ModelSpec, QuantizationSpec
from offloadd.hosting.loading.plain_loading import UNFIT
from offloadd.hosting.loading.skeletons import NotReproducible, quantised_skeleton
from offloadd.hosting.loading.stand_ins import class_to_build
from offloadd.hosting.quantization.gguf_files import is_gguf
from offloadd.hosting.quantization.library import METHOD, check_library
from offloadd.hosting.sources.classes import component_class
from offloadd.hosting.sources.component_config import read_config
from offloadd.offload.grouping.groups import module_layout
from offloadd.store.index import ComponentFiles, PipelineFiles
from offloadd.store.index.weight_file import refuse


def check_quantised(spec: ModelSpec, files: PipelineFiles) -> frozenset[str]:
    """The components that are to be quantised or were saved so; not those in GGUF files.

    Raises `ModelLoadFailed` for weights that only another quantiser's own classes can compute with,
    and where the library is not there; `InvalidRequest` for settings that do not go with weights
    that are quantised already.
    """
    found: set[str] = set()
    for one in files.components:
        if one.checkpoint is None:
            continue
        wanted = _wanted(spec, one.name)
        if is_gguf(one.checkpoint.location):
            _check_alone(spec, one)
        elif one.weights_place is not None and wanted is not None:
            raise _not_from_a_file(spec, one)
        elif _is_saved_quantised(spec, one) or wanted is not None:
            check_library(spec.name)
            found.add(one.name)
    return frozenset(found)


def quantised_bytes(
    spec: ModelSpec, files: PipelineFiles, names: Collection[str], dtype: torch.dtype
) -> dict[str, int]:
    """Bytes of the weights of these components, as they are stored.

    Raises `InvalidRequest` for a component that was asked for by its name and has nothing to
    quantise. Says nothing of one that cannot be built, which loading will refuse with the reason.
    """
    found: dict[str, int] = {}
    for one in files.components:
        size_bytes = _stored_bytes(spec, one, dtype) if one.name in names else None
        if size_bytes is not None:
            found[one.name] = size_bytes
    return found


def _stored_bytes(spec: ModelSpec, files: ComponentFiles, dtype: torch.dtype) -> int | None:
    assert files.checkpoint is not None  # whoever lists it has looked
    wanted = _wanted(spec, files.name)
    kind = component_class(files.name, files.library, files.class_name)
    try:
        built = class_to_build(files.name, kind, files.directory)
        skeleton = quantised_skeleton(built, files.directory, files.checkpoint, dtype, wanted)
    except (*UNFIT, RuntimeError, NotReproducible):
        return None
    if wanted is not None and not skeleton.quantised and files.name in spec.own_offloads:
        raise InvalidRequest(
            f"model {spec.name!r}: {files.name!r} cannot have quantization = {wanted.type!r}: "
            f"{type(skeleton.module).__name__} has no linear layers that it leaves to quantise",
            hint="leave it out, or set it for components that have them",
            details={"component": files.name, "setting": "quantization"},
        )
    return sum(slot.spec.size_bytes for slot in module_layout(skeleton.module).slots().values())


def _wanted(spec: ModelSpec, component: str) -> QuantizationSpec | None:
    return spec.own_offloads.get(component, spec.offload).quantization


def _not_from_a_file(spec: ModelSpec, files: ComponentFiles) -> InvalidRequest:
    return InvalidRequest(
        f"model {spec.name!r}: the weights of {files.name!r} are in a single file, which is not "
        "quantised when it is loaded",
        hint="host it from a directory that save_pretrained wrote, or leave quantization out",
        details={"component": files.name, "setting": "quantization"},
    )


def _is_saved_quantised(spec: ModelSpec, files: ComponentFiles) -> bool:
    found = read_config(files.directory).get("quantization_config")
    if not isinstance(found, dict):
        return False
    method = str(found.get("quant_method") or "an unnamed method")[:100]
    if method != METHOD:
        raise refuse(
            files.directory,
            f"holds weights quantised by {method}, which are not hosted",
            f"take the model's plain weights and quantise them when it is loaded (quantization = "
            f'"int8"), or weights that {METHOD} quantised; storage_dtype = "float8_e4m3fn" stores '
            "and moves plain ones in 8 bits",
            kind="quantised",
            component=files.name,
            found=method,
        )
    _check_alone(spec, files)
    return True


def _check_alone(spec: ModelSpec, files: ComponentFiles) -> None:
    """Raise for settings that would change how weights are stored that are quantised already."""
    settings = spec.own_offloads.get(files.name, spec.offload)
    for given in ("quantization", "storage_dtype"):
        if getattr(settings, given) is not None:
            raise InvalidRequest(
                f"model {spec.name!r}: {files.name!r} was saved with quantised weights, and cannot "
                f"have {given}",
                hint="leave it out for this component",
                details={"component": files.name, "setting": given},
            )
