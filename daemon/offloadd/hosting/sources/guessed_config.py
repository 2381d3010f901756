"""Which model on the hub a single-file checkpoint is like, so that people can be told.

Only ever said, never fetched: many models share one layout, and a guess that is wrong costs a load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.loaders.single_file_utils import CHECKPOINT_KEY_NAMES, fetch_diffusers_config

from offloadd.offload.weights.forms import DTYPES
from offloadd.store.index import TensorPlace

_OF_ANY = "v1"
"""What diffusers takes a file for that it does not know."""


def guessed_config(tensors: Mapping[str, TensorPlace]) -> str:
    """A model's name on the hub, or an empty string."""
    blanks = {
        name: torch.empty(place.spec.shape, dtype=DTYPES[place.spec.dtype], device="meta")
        for name, place in tensors.items()
    }
    try:
        found: Any = fetch_diffusers_config(blanks)
    except (KeyError, IndexError, AttributeError, ValueError):
        return ""
    name = str(found["pretrained_model_name_or_path"])
    is_known = any(_has(key, blanks) for key in CHECKPOINT_KEY_NAMES.values())
    return name if is_known else ""


def _has(key: str | list[str], names: Mapping[str, Any]) -> bool:
    return any(one in names for one in ([key] if isinstance(key, str) else key))
