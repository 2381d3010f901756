"""Whether the adapters that a request names are the model's: judged before it is queued."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from offload_protocol.errors import InvalidRequest
from offload_protocol.messages import AdapterChoice
from offloadd.channel.specs import ModelSpec


def check_adapters(chosen: Sequence[AdapterChoice], spec: ModelSpec) -> None:
    """Raise `InvalidRequest` for adapters that were not registered with the model.

    Also for a weight that is no finite number, and for one that is named twice.
    """
    known = [one.name for one in spec.adapters]
    seen: set[str] = set()
    for one in chosen:
        if one.name not in known:
            raise _unknown(one.name, spec.name, known)
        if one.name in seen:
            raise InvalidRequest(f"the adapter {one.name!r} is named twice", hint="name it once")
        seen.add(one.name)
        if not math.isfinite(one.weight):
            raise InvalidRequest(
                f"the weight of the adapter {one.name!r} is {one.weight}",
                hint="give a finite number; 1 is its full strength",
            )


def _unknown(name: str, model: str, known: Sequence[str]) -> InvalidRequest:
    near = difflib.get_close_matches(name, known, n=1)
    has = f"it has {', '.join(known)}" if known else "an administrator registers them with it"
    return InvalidRequest(
        f"the model {model!r} has no adapter {name[:100]!r}",
        hint=f"did you mean {near[0]!r}? {has}" if near else has,
        details={"known": list(known)},
    )
