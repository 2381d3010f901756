"""What makes two extents the same one: the same states of the same files, laid out the same way.

Names of tensors and of layers are no part of it, nor is how a component is grouped: they change
no byte.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import Layout, align

PIECE_BYTES = 256 * 1024 * 1024
"""The largest piece of an extent that is allocated, page-locked and evicted by itself."""

_VERSION = b"offloadd extent 1"


def extent_key(
    index: CheckpointIndex, layout: Layout, names: Mapping[str, str] | None = None
) -> str:
    """A digest of the files' states and of where each tensor's bytes go.

    `names` is as in `CheckpointSource`; a tensor that is not in the index is left to that class to
    refuse. A file that was renamed back and forth, linked or re-owned counts as another state: its
    bytes are read again, and merged if they are the same.
    """
    digest = hashlib.blake2b(_VERSION, digest_size=20)
    for file in index.files:
        it = file.identity
        state = (it.device, it.inode, it.size_bytes, it.mtime_ns, it.ctime_ns)
        digest.update(repr(state).encode())
    for name, slot in layout.slots().items():
        place = index.tensors.get((names or {}).get(name, name))
        where = (place.file_index, place.start_bytes) if place else None
        digest.update(repr((slot.offset_bytes, slot.spec.size_bytes, where)).encode())
    digest.update(str(layout.size_bytes).encode())
    return digest.hexdigest()


def piece_sizes(size_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[int]:
    """The pieces of an extent: all of one size, the last one as short as whole pages allow.

    A unit may lie across two pieces: they are mapped side by side, so nobody can tell.
    """
    whole = align(size_bytes, mmap.PAGESIZE)
    return [min(piece_bytes, whole - start) for start in range(0, whole, piece_bytes)]


def pack_index(index: CheckpointIndex) -> bytes:
    """The index as bytes, for a time when its files cannot be read."""
    return msgspec.msgpack.encode(index, enc_hook=_path_to_text)


def unpack_index(data: bytes) -> CheckpointIndex:
    """The index again. Raises `msgspec.DecodeError` for bytes that are none."""
    return msgspec.msgpack.decode(data, type=CheckpointIndex, dec_hook=_text_to_path)


def place_of(location: Path, variant: str | None) -> str:
    """How an index is asked for again: by what was indexed."""
    return f"{location}?{variant or ''}"


def _path_to_text(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _text_to_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(kind)
