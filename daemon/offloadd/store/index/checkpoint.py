"""A component's checkpoint as one table: every tensor, the file it lies in, and where.

`read_checkpoint` takes what people have: one file, an index of shards, or a directory. It reads
headers only, and what it returns has been checked whole: all shards there, every promised tensor
in its place, every size consistent with its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offload_protocol.errors import ModelLoadFailed
from offloadd.store.index.naming import (
    PICKLE_SUFFIXES,
    choose_weights,
    is_index_name,
    orphan_shards,
    pickled_weights,
)
from offloadd.store.index.shards import read_shard_index
from offloadd.store.index.weight_file import (
    FileContents,
    IndexedFile,
    looking_at,
    read_weight_file,
    refuse,
)
from offloadd.store.layout import TensorSpec

_NAMED_AT_MOST = 20


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor, the position of its file in `CheckpointIndex.files`, and its bytes' range there."""

    spec: TensorSpec
    file_index: int
    start_bytes: int

    @property
    def stop_bytes(self) -> int:
        return self.start_bytes + self.spec.size_bytes


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """All tensors of a checkpoint by name.

    `location` is what was indexed (for messages), `variant` the variant that was really found,
    `ignored` the names of tensors that lie in shards without being in the index's allow-list.

    With `is_original`, the tensors are as diffusers names and arranges them, and the file is as the
    model's authors do; `unplaced` names those whose bytes are not in the file in that arrangement,
    so that their places say nothing.
    """

    location: Path
    files: tuple[IndexedFile, ...]
    tensors: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]
    variant: str | None = None
    ignored: tuple[str, ...] = ()
    is_original: bool = False
    unplaced: frozenset[str] = frozenset()

    @property
    def size_bytes(self) -> int:
        """Bytes of tensor data, without headers and ignored tensors."""
        return sum(place.spec.size_bytes for place in self.tensors.values())

    def require(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every tensor a model needs is here with its shape.

        Raises `ModelLoadFailed` that names every missing and every mis-shaped tensor.
        """
        missing = [name for name in expected if name not in self.tensors]
        misshaped = {
            name: (tuple(shape), self.tensors[name].spec.shape)
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].spec.shape != tuple(shape)
        }
        if missing or misshaped:
            raise self._unfit(missing, misshaped)

    def _unfit(
        self,
        missing: list[str],
        misshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    ) -> ModelLoadFailed:
        parts: list[str] = []
        if missing:
            parts.append(f"lacks {len(missing)} of the model's tensors: {', '.join(missing)}")
        if misshaped:
            told = [
                f"{name} in {self.files[self.tensors[name].file_index].path.name} "
                f"(expected {list(want)}, found {list(have)})"
                for name, (want, have) in misshaped.items()
            ]
            parts.append(f"has {len(told)} tensors of another shape: {', '.join(told)}")
        return refuse(
            self.location,
            " and ".join(parts),
            "the checkpoint belongs to another model or configuration, or was saved incompletely; "
            "download it again or correct config.json",
            kind="unfit",
            missing=missing,
            misshaped={
                name: {"expected": list(want), "found": list(have)}
                for name, (want, have) in misshaped.items()
            },
        )


def read_checkpoint(path: Path, *, variant: str | None = None) -> CheckpointIndex:
    """Index a weight file, a shard index, or a component's directory.

    `variant` (for example "fp16") only matters for a directory; where the directory does not have
    it, its plain files are taken. Raises `ModelLoadFailed` or, for a failing disk, `StorageFailed`.
    """
    with looking_at(path):
        if path.is_dir():
            return _from_directory(path, variant)
        if is_index_name(path.name):
            return _from_shards(path, None)
        if path.name.endswith(PICKLE_SUFFIXES):
            raise _pickled(path.parent, [path.name])
        return _from_file(path, None)


def _from_directory(directory: Path, variant: str | None) -> CheckpointIndex:
    names = list_directory(directory)
    chosen = choose_weights(names, variant)
    if chosen is None:
        raise no_weights(directory, names)
    read = _from_shards if chosen.is_index else _from_file
    return read(directory / chosen.name, chosen.variant)


def list_directory(directory: Path) -> list[str]:
    """The names in a model's directory, sorted. Raises `ModelLoadFailed` if it cannot be read."""
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise refuse(
            directory, f"cannot be listed: {error.strerror}", "check the path and its permissions"
        ) from error


def no_weights(directory: Path, names: list[str]) -> ModelLoadFailed:
    """The refusal for a directory without usable weights: pickles and lost indexes are named."""
    if shards := orphan_shards(names):
        return refuse(
            directory,
            f"has {len(shards)} shards (the first is {shards[0]}) but no *.safetensors.index.json "
            "that says what is in them",
            "download the index file as well",
            kind="no_index",
            found=shards,
        )
    if pickled := pickled_weights(names):
        return _pickled(directory, pickled)
    found = ", ".join(names[:_NAMED_AT_MOST]) or "nothing"
    return refuse(
        directory,
        f"has no safetensors weights (found: {found})",
        "check the source, or download the model again",
        kind="no_weights",
        found=names[:_NAMED_AT_MOST],
    )


def _pickled(directory: Path, names: list[str]) -> ModelLoadFailed:
    return refuse(
        directory,
        f"has its weights only as Python pickles ({', '.join(names[:_NAMED_AT_MOST])}), and "
        "pickles are not accepted: loading one can run code",
        "use a checkpoint in safetensors form; or convert this one on a machine where you trust it "
        "with save_pretrained(..., safe_serialization=True); or, as an administrator, host the "
        "model with weights_only = true, which takes tensors from pickles and nothing else",
        kind="pickle",
        found=names,
    )


def _from_file(path: Path, variant: str | None) -> CheckpointIndex:
    contents = read_weight_file(path)
    places = {name: _place(contents, name, 0) for name in contents.specs}
    return CheckpointIndex(path, (contents.file,), places, contents.metadata, variant)


def _from_shards(path: Path, variant: str | None) -> CheckpointIndex:
    weight_map = read_shard_index(path)
    names = sorted(set(weight_map.values()))
    _check_present(path, names)
    shards = [read_weight_file(path.parent / name) for name in names]
    position = {name: at for at, name in enumerate(names)}
    _check_complete(path, weight_map, dict(zip(names, shards, strict=True)))
    places = {
        tensor: _place(shards[position[shard]], tensor, position[shard])
        for tensor, shard in weight_map.items()
    }
    ignored = {
        name
        for shard_name, shard in zip(names, shards, strict=True)
        for name in shard.specs
        if weight_map.get(name) != shard_name
    }
    metadata = {key: text for shard in shards for key, text in shard.metadata.items()}
    files = tuple(shard.file for shard in shards)
    return CheckpointIndex(path, files, places, metadata, variant, tuple(sorted(ignored)))


def _place(contents: FileContents, name: str, file_index: int) -> TensorPlace:
    return TensorPlace(contents.specs[name], file_index, contents.starts[name])


def _check_present(path: Path, names: list[str]) -> None:
    lost = [name for name in names if not (path.parent / name).exists()]
    # One lost file is told about by the reader, which knows a dangling link from a missing file.
    if len(lost) > 1:
        raise refuse(
            path,
            f"names {len(names)} shards of which {len(lost)} are not there: {', '.join(lost)}",
            "the download did not finish; repeat it",
            kind="missing_shards",
            expected=names,
            found=[name for name in names if name not in lost],
        )


def _check_complete(
    path: Path, weight_map: Mapping[str, str], shards: Mapping[str, FileContents]
) -> None:
    lost = {
        tensor: shard for tensor, shard in weight_map.items() if tensor not in shards[shard].specs
    }
    if lost:
        told = ", ".join(f"{tensor} (in {shard})" for tensor, shard in lost.items())
        raise refuse(
            path,
            f"places {len(lost)} tensors in shards that do not hold them: {told}",
            "the shards and the index are from different versions; download the model again",
            kind="missing_tensors",
            missing=lost,
        )
