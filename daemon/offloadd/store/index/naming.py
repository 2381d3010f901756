"""Which files of a component's directory hold its weights, as diffusers and transformers name them.

Pure: a list of file names and a variant in, one choice out. A variant that the directory does not
have falls back to the plain files, as `from_pretrained` of a pipeline does. diffusers looks for an
index before a single file and transformers the other way round; each stem keeps its library's
order here, so that both sides choose the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

DIFFUSERS_STEM = "diffusion_pytorch_model"
TRANSFORMERS_STEM = "model"
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}(\.[^.]+)?\.safetensors")
_PICKLE = re.compile(
    r"(diffusion_pytorch_model|pytorch_model)(\.(?P<variant>[^.-]+))?"
    r"(-\d{5}-of-(?P<shards>\d{5}))?\.bin"
)
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt"})


@dataclass(frozen=True, slots=True)
class WeightName:
    """The file to start from: an index of shards, or the one file that holds everything."""

    name: str
    is_index: bool
    variant: str | None


def choose_weights(names: Iterable[str], variant: str | None) -> WeightName | None:
    """The weights of a component among the names in its directory, or None."""
    there = frozenset(names)
    wanted = [variant, None] if variant is not None else [None]
    for one in wanted:
        for candidate in _candidates(one):
            if candidate.name in there:
                return candidate
    return None


def is_index_name(name: str) -> bool:
    """Whether a name is `x.safetensors.index.json`, with or without a variant in either place."""
    return re.fullmatch(r".+\.safetensors(\.[^.]+)?\.index(\.[^.]+)?\.json", name) is not None


def orphan_shards(names: Iterable[str]) -> list[str]:
    """Shards whose index is not there, sorted."""
    return sorted(name for name in names if _SHARD.fullmatch(name))


def pickled_weights(names: Iterable[str]) -> list[str]:
    """Files that hold weights as Python pickles, sorted."""
    return sorted(
        name for name in names if name.endswith(PICKLE_SUFFIXES) and name not in _NOT_WEIGHTS
    )


def choose_pickles(names: Iterable[str], variant: str | None) -> list[str]:
    """The pickles that are a component's weights, all shards of them, sorted; or none."""
    found = [match for name in names if (match := _PICKLE.fullmatch(name))]
    variants = {match["variant"] for match in found}
    chosen = [match for match in found if match["variant"] == (variant or None)]
    if not chosen and None in variants:
        chosen = [match for match in found if match["variant"] is None]
    whole = [match[0] for match in chosen if match["shards"] is None]
    shards = sorted(match[0] for match in chosen if match["shards"] is not None)
    is_complete = all(int(match["shards"]) == len(shards) for match in chosen if match["shards"])
    return whole[:1] or (shards if is_complete else [])


def _candidates(variant: str | None) -> tuple[WeightName, ...]:
    infix = f".{variant}" if variant else ""

    def single(stem: str) -> WeightName:
        return WeightName(f"{stem}{infix}.safetensors", False, variant)

    def index(stem: str) -> WeightName:
        return WeightName(f"{stem}.safetensors.index{infix}.json", True, variant)

    older = WeightName(f"{DIFFUSERS_STEM}.safetensors{infix}.index.json", True, variant)
    return (
        index(DIFFUSERS_STEM),
        older,
        single(DIFFUSERS_STEM),
        single(TRANSFORMERS_STEM),
        index(TRANSFORMERS_STEM),
    )
