"""Packs of weights that cannot be used as they lie, each written once by a process of its own.

Promises: a pack that is found serves exactly the files, class and dtypes that it was written for;
one that these have outgrown is deleted when its successor is written. The writer is a child, so
that its memory is returned whole, and it ends with this process.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import diffusers
import msgspec
import torch
import transformers

from offload_protocol.codec import to_exception
from offload_protocol.errors import InternalError, ModelLoadFailed
from offloadd.channel.specs import QuantizationSpec
from offloadd.hosting.loading.weights import Weights
from offloadd.hosting.packs.pack_order import (
    PackAnswer,
    PackOrder,
    pack_key,
    pack_prefix,
    packed_units,
)
from offloadd.hosting.quantization.library import library_version
from offloadd.hosting.sources.dtypes import dtype_name
from offloadd.store.index import CheckpointIndex, ComponentFiles, read_checkpoint
from offloadd.store.index.pipeline import Recall, nothing_recalled
from offloadd.store.pack_cache import SourceFile, may_serve

_LOOK_EVERY_S = 0.1
_WRITER = "offloadd.hosting.packs.pack_writer"


@dataclass(frozen=True, slots=True)
class Packs:
    """The packs in one directory."""

    directory: Path

    def order(
        self,
        how: Literal["cast", "load"],
        files: ComponentFiles,
        weights: Weights,
        dtype: torch.dtype,
        quantization: QuantizationSpec | None = None,
    ) -> PackOrder:
        """The order for a component's weights in the dtypes of their layout.

        `cast` where the files have every tensor, `load` where only the class's `from_pretrained`
        can read them, or is to quantise them.
        """
        names, through = dict(weights.names), dict(weights.through)
        about = [how, files.library, files.class_name, repr(sorted(through.items()))]
        if how == "load":
            about += [dtype_name(dtype), *_loaders(files.directory)]
            about += [repr(quantization), library_version()]
        key = pack_key(weights.index, weights.layout, names, about)
        name = f"{pack_prefix(files.directory)}-{key}.safetensors"
        return PackOrder(
            path=str(self.directory / name),
            how=how,
            component=files.name,
            library=files.library,
            class_name=files.class_name,
            directory=str(files.directory),
            location=str(weights.index.location),
            variant=weights.index.variant,
            dtype=dtype_name(dtype),
            files=[SourceFile.of(file) for file in weights.index.files],
            units=packed_units(weights.layout),
            names=names,
            through=through,
            quantization=quantization,
        )


def write_packs(
    orders: Sequence[PackOrder], watch: Callable[[], None], recall: Recall = nothing_recalled
) -> None:
    """Write those packs that are neither there nor, their files being gone, in memory still.

    `watch` is called while the writer works; `recall` tells what is in memory. Raises
    `StorageFailed` where they cannot be written, what `from_pretrained` of a class is refused for,
    and what `watch` raises.
    """
    missing = [order for order in orders if not _is_there(order, recall)]
    if not missing:
        return
    _write(missing, watch)
    for order in missing:
        path = Path(order.path)
        prefix = path.name.partition("-")[0]
        for older in path.parent.glob(f"{prefix}-*.safetensors"):
            # Another model may want these files in another dtype, or quantised otherwise.
            if older != path and not may_serve(older):
                older.unlink(missing_ok=True)


def packed_weights(
    order: PackOrder, weights: Weights, recall: Recall = nothing_recalled
) -> Weights:
    """The weights as the pack of their order holds them."""
    return Weights(_index_of(Path(order.path), recall), weights.layout, {}, {})


def _is_there(order: PackOrder, recall: Recall) -> bool:
    if Path(order.path).exists():
        return True
    # As long as it can be written again, what is in memory need not do.
    is_gone = not all(Path(file.path).exists() for file in order.files)
    return is_gone and recall(Path(order.path), None) is not None


def _index_of(path: Path, recall: Recall) -> CheckpointIndex:
    try:
        return read_checkpoint(path)
    except ModelLoadFailed:
        index = recall(path, None)
        if index is None:
            raise
        return index


def _loaders(directory: Path) -> list[str]:
    config = (directory / "config.json").read_bytes()
    return [diffusers.__version__, transformers.__version__, hashlib.sha256(config).hexdigest()]


def _write(orders: Sequence[PackOrder], watch: Callable[[], None]) -> None:
    command = [sys.executable, "-P", "-m", _WRITER]
    with tempfile.TemporaryFile() as said:
        # Not a pipe: the writer reads only when it has started, and a pipe does not hold them all.
        said.write(msgspec.json.encode(orders))
        said.seek(0)
        with subprocess.Popen(command, stdin=said, stdout=subprocess.PIPE) as writer:
            try:
                told = _wait_for(writer, watch)
            except BaseException:
                writer.kill()
                raise
    try:
        answer = msgspec.json.decode(told, type=PackAnswer)
    except msgspec.DecodeError:
        names = ", ".join(order.component for order in orders)
        raise InternalError(
            f"the writer of packs for {names} ended with status {writer.returncode}",
            hint="the daemon's log may say why; there may have been too little memory",
        ) from None
    if answer.error is not None:
        raise to_exception(answer.error)


def _wait_for(writer: subprocess.Popen[bytes], watch: Callable[[], None]) -> bytes:
    while True:
        watch()
        try:
            return writer.communicate(timeout=_LOOK_EVERY_S)[0]
        except subprocess.TimeoutExpired:
            continue
