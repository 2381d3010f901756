"""Which component is offloaded how: a model's settings, checked against what it is made of.

Whatever a device cannot do is refused here, with a sentence, before anything is loaded; what is
taken although it changes nothing is answered with a note.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from offload_protocol.errors import InvalidRequest
from offloadd.channel.specs import NOTHING_TO_CHOOSE, ModelSpec, OffloadSpec

Plan = Mapping[str, OffloadSpec]
"""The settings of each component that holds weights, by its name; never `auto`."""


def check_settings(spec: ModelSpec, with_weights: Collection[str]) -> None:
    """Raise `InvalidRequest` for settings that this model cannot have."""
    for name in spec.components:
        if name not in with_weights:
            raise InvalidRequest(
                f"model {spec.name!r} has no component {name!r} that holds weights",
                hint=f"its components are: {', '.join(with_weights)}",
            )
    for place, offload in [("offload", spec.offload), *spec.components.items()]:
        _check(spec.name, place, offload)


def make_plan(spec: ModelSpec, with_weights: Collection[str], auto: OffloadSpec) -> Plan:
    """The settings of every component; `auto` is what that word stands for here and now."""
    own = spec.own_offloads
    chosen = {name: own.get(name, spec.offload) for name in with_weights}
    return {
        name: msgspec.structs.replace(one, mode=auto.mode) if one.mode == "auto" else one
        for name, one in chosen.items()
    }


def setting_notes(spec: ModelSpec) -> list[str]:
    """A sentence for each place with settings that are taken and change nothing."""
    notes: list[str] = []
    for place, offload in [("offload", spec.offload), *spec.components.items()]:
        idle = sorted(NOTHING_TO_CHOOSE & offload.group_parameters().keys())
        if idle:
            notes.append(
                f"{', '.join(idle)} of {place} change nothing: weights always move beside the "
                "computation, in order, from memory that is page-locked in place"
            )
    return notes


def _check(model: str, place: str, offload: OffloadSpec) -> None:
    path = offload.offload_to_disk_path
    if path is not None and not Path(path).is_absolute():
        raise InvalidRequest(
            f"model {model!r}: offload_to_disk_path of {place} is {path!r}, not an absolute path",
            hint="the daemon has another working directory; give the path from the root",
        )
