"""The index of a sharded checkpoint: which tensor lies in which file, and nothing outside it.

The index is an allow-list: what a shard holds beyond it is ignored, and what it promises must be
there. Shard names are plain names of files beside the index; anything else is refused, because an
index comes from whoever made the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offloadd.store.index.content import HEAD_BYTES, recognise
from offloadd.store.index.strict_json import parse_object
from offloadd.store.index.weight_file import read_small_file, refuse

INDEX_LIMIT_BYTES = 100_000_000
_HINT = "download the index again; it does not describe a checkpoint"


def read_shard_index(path: Path) -> Mapping[str, str]:
    """The file name of each tensor's shard.

    Raises `ModelLoadFailed` for an index that is missing, not sound, empty, or that names a file
    by anything but a plain name ending in .safetensors.
    """
    text = read_small_file(path, INDEX_LIMIT_BYTES)
    imposter = recognise(text[:HEAD_BYTES], len(text))
    if imposter is not None:
        raise refuse(path, imposter.problem, imposter.hint, kind=imposter.kind, found=len(text))
    try:
        index = parse_object(text)
    except ValueError as error:
        raise refuse(path, f"is no sound shard index: {error}", _HINT, kind="bad_index") from None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refuse(path, "has no weight_map that names tensors", _HINT, kind="bad_index")
    for tensor, shard in weight_map.items():
        _check_shard_name(path, tensor, shard)
    return weight_map


def _check_shard_name(path: Path, tensor: str, shard: Any) -> None:
    plain = isinstance(shard, str) and shard not in ("", ".", "..") and "\x00" not in shard
    if not plain or "/" in shard or "\\" in shard:
        raise refuse(
            path,
            f"its shard is {shard!r}, which is not the plain name of a file beside the index",
            "use a checkpoint whose index names files in its own directory only",
            tensor=tensor,
            kind="unsafe_reference",
            expected="a plain file name",
            found=shard if isinstance(shard, str) else repr(shard),
        )
    if not shard.endswith(".safetensors"):
        raise refuse(
            path,
            f"its shard is {shard!r}, which is not a safetensors file",
            "convert the checkpoint with save_pretrained(..., safe_serialization=True)",
            tensor=tensor,
            kind="pickle",
            expected="*.safetensors",
            found=shard,
        )
