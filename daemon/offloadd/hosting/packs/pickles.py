"""Weights that people have only as Python pickles, rewritten once as a pack where that is allowed.

Promises: no pickle is read in this process, and none with anything but torch's `weights_only`
loader, which builds tensors and runs nothing that a file names. From then on the pack stands for
the files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from offloadd.hosting.packs.pack_order import PackOrder, pack_prefix
from offloadd.hosting.packs.packs import write_packs
from offloadd.store.index import CheckpointIndex, FileIdentity, IndexedFile, read_checkpoint
from offloadd.store.index.naming import choose_pickles
from offloadd.store.pack_cache import SourceFile

_VERSION = "offloadd pickles 1"


@dataclass(frozen=True, slots=True)
class Unpickler:
    """Rewrites pickles into the cache directory; `watch` is called while that is done."""

    cache: Path
    watch: Callable[[], None] = lambda: None

    def __call__(self, place: Path, variant: str | None) -> CheckpointIndex | None:
        """The weights of a file, or of a component's directory; None where that has none whole.

        Raises `ModelLoadFailed` for pickles that hold anything but tensors, `StorageFailed`.
        """
        directory, names = place.parent, [place.name]
        if place.is_dir():
            directory = place
            names = choose_pickles(os.listdir(directory), variant)  # noqa: PTH208
        if not names:
            return None
        sources = [_source(directory / name) for name in names]
        digest = hashlib.blake2b(repr([_VERSION, torch.__version__, sources]).encode())
        # Packs of a component go when it gets another; these are of another kind.
        name = f"{pack_prefix(place / 'pickles')}-{digest.hexdigest()[:32]}.safetensors"
        path = self.cache / name
        order = PackOrder(
            path=str(path),
            how="unpickle",
            component=directory.name,
            directory=str(directory),
            files=sources,
        )
        write_packs([order], self.watch)
        return read_checkpoint(path)


def _source(path: Path) -> SourceFile:
    return SourceFile.of(IndexedFile(path, FileIdentity.of(path.stat())))
