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
from dataclasses import dataclass, replace
from pathlib import Path

import diffusers
import msgspec
import torch
import transformers

from offload_protocol.codec import to_exception
from offload_protocol.errors import InternalError, ModelLoadFailed
from offloadd.channel.specs import QuantizationSpec
from offloadd.hosting.loading.weights import Weights
from offloadd.hosting.packs.pack_order import (
    How,
    PackAnswer,
    PackedUnit,
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
        how: How,
        files: ComponentFiles,
        weights: Weights,
        dtype: torch.dtype,
        quantization: QuantizationSpec | None = None,
    ) -> PackOrder:
        """The order for a component's weights in the dtypes of their layout.

        `cast` where the files have every tensor, `load` where only the class's `from_pretrained`
        can read them, or is to quantise them; `convert` where those alone are packed that the file
        has otherwise.
        """
        names, through = dict(weights.names), dict(weights.through)
        about = [how, files.library, files.class_name, repr(sorted(through.items()))]
        if how in ("load", "convert"):
            about += [dtype_name(dtype), *_loaders(files.directory)]
            about += [repr(quantization), library_version()]
        key = pack_key(weights.index, weights.layout, names, about)
        units, location = packed_units(weights.layout), weights.index.location
        if how == "convert":
            units, location = _units_to_convert(weights), weights.index.files[0].path
        return PackOrder(
            path=str(self._path(files.origin, key)),
            how=how,
            component=files.name,
            library=files.library,
            class_name=files.class_name,
            directory=str(files.directory),
            location=str(location),
            variant=weights.index.variant,
            dtype=dtype_name(dtype),
            files=[SourceFile.of(file) for file in weights.index.files],
            units=units,
            names=names,
            through=through,
            quantization=quantization,
        )

    def _path(self, origin: Path, key: str) -> Path:
        # One file under two names is one pack: the key says which file it is.
        default = self.directory / f"{pack_prefix(origin)}-{key}.safetensors"
        return next(self.directory.glob(f"*-{key}.safetensors"), default)


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
    """The weights as the pack of their order holds them, and the original files what it lacks."""
    index = _index_of(Path(order.path), recall)
    if order.how == "convert" and not index.is_original:
        index = _beside_the_file(weights, index)
    return Weights(index, weights.layout, {}, {})


def _beside_the_file(weights: Weights, pack: CheckpointIndex) -> CheckpointIndex:
    """One index of a file and of the pack that has what the file has otherwise."""
    file = weights.index
    names = {**{name: name for name in file.tensors}, **weights.names}
    places = {name: file.tensors[there] for name, there in names.items()}
    for name, place in pack.tensors.items():
        places[name] = replace(place, file_index=place.file_index + len(file.files))
    return replace(
        file,
        location=pack.location,
        files=(*file.files, *pack.files),
        tensors=places,
        unplaced=frozenset(),
    )


def _units_to_convert(weights: Weights) -> list[PackedUnit]:
    wanted = weights.indirect
    units = [
        PackedUnit(unit.name, tensors)
        for unit in packed_units(weights.layout)
        if (tensors := [one for one in unit.tensors if one[0] in wanted])
    ]
    # Buffers are in no layout; the module's are filled from the same index.
    index, named = weights.index, set(weights.names.values())
    buffers = [index.tensors[name].spec for name in sorted(index.unplaced - named)]
    if buffers:
        units.append(PackedUnit("", [(one.name, one.dtype, one.shape) for one in buffers]))
    return units


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
