"""Which component is offloaded how: a model's settings, checked against what it is made of.

Whatever a device cannot do is refused here, with a sentence, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from offload_protocol.errors import InvalidRequest
from offloadd.channel.specs import ModelSpec, OffloadSpec

Plan = Mapping[str, OffloadSpec]
"""The settings of each component that holds weights, by its name; never `auto`."""


def check_settings(spec: ModelSpec, with_weights: Collection[str], on_cpu: bool) -> None:
    """Raise `InvalidRequest` for settings that this model or this device cannot have."""
    for name in spec.components:
        if name not in with_weights:
            raise InvalidRequest(
                f"model {spec.name!r} has no component {name!r} that holds weights",
                hint=f"its components are: {', '.join(with_weights)}",
            )
    for place, offload in [("offload", spec.offload), *spec.components.items()]:
        _check(spec.name, place, offload, on_cpu)


def make_plan(spec: ModelSpec, with_weights: Collection[str], auto: OffloadSpec) -> Plan:
    """The settings of every component; `auto` is what that word stands for here and now."""
    chosen = {name: spec.components.get(name, spec.offload) for name in with_weights}
    return {name: auto if one.mode == "auto" else one for name, one in chosen.items()}


def _check(model: str, place: str, offload: OffloadSpec, on_cpu: bool) -> None:
    if on_cpu:
        for name in ("use_stream", "record_stream"):
            if getattr(offload, name):
                raise InvalidRequest(
                    f"model {model!r}: {name} of {place} needs an accelerator, and this device is "
                    "the CPU",
                    hint=f"leave {name} out, or host the model on an accelerator",
                )
    path = offload.offload_to_disk_path
    if path is not None and not Path(path).is_absolute():
        raise InvalidRequest(
            f"model {model!r}: offload_to_disk_path of {place} is {path!r}, not an absolute path",
            hint="the daemon has another working directory; give the path from the root",
        )
