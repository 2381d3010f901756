"""Which files of a model on the hub a pipeline needs: the weights that would be read, no others.

Pure: the names in a repository and its model_index.json in, names out. Weights are chosen as in a
directory, so that what is downloaded is what is then taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from offloadd.store.index.naming import WeightName, choose_pickles, choose_weights
from offloadd.store.index.pipeline import MODEL_INDEX_NAME, is_component

BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken", ".bpe")
"""Endings of configurations and vocabularies."""


def needed_files(
    index: Mapping[str, Any],
    names: Iterable[str],
    *,
    variant: str | None = None,
    without: Collection[str] = (),
    pickles: bool = False,
) -> list[str]:
    """The files of a pipeline whose model_index.json is `index`, sorted.

    Components in `without` come without weights; pickles are taken where these are wanted and
    nothing else is there.
    """
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, slash, file = name.partition("/")
        if slash and "/" not in file:
            folders.setdefault(folder, []).append(file)
    found = [MODEL_INDEX_NAME]
    for component, value in index.items():
        if component.startswith("_") or not is_component(value):
            continue
        there = folders.get(component, [])
        files = [one for one in there if _is_beside_weights(one)]
        if component not in without:
            files += _weights(there, variant, pickles)
        found += [f"{component}/{one}" for one in files]
    return sorted(set(found))


def _is_beside_weights(name: str) -> bool:
    return name.endswith(BESIDE_WEIGHTS) and not re.search(r"\.index(\.[^.]+)?\.json$", name)


def _weights(names: list[str], variant: str | None, pickles: bool) -> list[str]:
    chosen = choose_weights(names, variant)
    if chosen is None:
        return choose_pickles(names, variant) if pickles else []
    return [chosen.name, *_shards(names, chosen)]


def _shards(names: list[str], chosen: WeightName) -> list[str]:
    if not chosen.is_index:
        return []
    stem = re.escape(chosen.name.partition(".")[0])
    # A variant stands before the number of a shard or behind it.
    infix = rf"\.{re.escape(chosen.variant)}" if chosen.variant else ""
    number = r"-\d{5}-of-\d{5}"
    pattern = re.compile(rf"{stem}({infix}{number}|{number}{infix})\.safetensors")
    return [name for name in names if pattern.fullmatch(name)]
