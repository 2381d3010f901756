"""What the writer of a pack is told, and how the pack of an order is named.

The name says all that the pack's bytes depend on, so that a pack which is there is the right one:
the states of the weight files, the class and its configuration, the layout, and the libraries that
read and cast.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec
import torch

from offload_protocol.records import ErrorInfo
from offloadd.channel.specs import QuantizationSpec
from offloadd.store.arena.key import extent_key
from offloadd.store.index import CheckpointIndex
from offloadd.store.layout import Layout, TensorSpec, lay_out
from offloadd.store.pack_cache import SourceFile

_VERSION = "offloadd pack 3"
_DIGITS = 32


How = Literal["cast", "load", "convert", "unpickle"]


class PackedUnit(msgspec.Struct, frozen=True):
    """A unit of the layout: its name, and name, dtype and shape of its tensors."""

    name: str
    tensors: list[tuple[str, str, tuple[int, ...]]]


class PackOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a component's weights in the dtypes of the layout.

    With `cast`, the files at `location` have these tensors under `names` and only their dtypes
    differ; with `load` the class's own `from_pretrained` reads them, with `dtype`; with `convert`
    the file at `location` has them in the layout of the model's authors; with `unpickle`
    the files are pickles, all of whose tensors are taken as they are. With `quantization` loading
    quantises. A tensor named in `through`
    is rounded to that dtype first. `files` are the weight files that it is made from.
    """

    path: str
    how: How
    component: str
    directory: str
    files: list[SourceFile]
    location: str = ""
    library: str = ""
    class_name: str = ""
    variant: str | None = None
    dtype: str = ""
    units: list[PackedUnit] = msgspec.field(default_factory=list)
    names: dict[str, str] = msgspec.field(default_factory=dict)
    through: dict[str, str] = msgspec.field(default_factory=dict)
    quantization: QuantizationSpec | None = None

    def layout(self) -> Layout:
        """The layout that the pack is to serve."""
        return lay_out(
            [
                (unit.name, [TensorSpec(name, dtype, shape) for name, dtype, shape in unit.tensors])
                for unit in self.units
            ]
        )


class PackAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The end of all orders; the error is that of the first one that failed."""

    error: ErrorInfo | None = None


def packed_units(layout: Layout) -> list[PackedUnit]:
    """A layout as an order says it."""
    return [
        PackedUnit(
            unit.name,
            [(slot.spec.name, slot.spec.dtype, slot.spec.shape) for slot in unit.tensors],
        )
        for unit in layout.units
    ]


def pack_key(
    index: CheckpointIndex, layout: Layout, names: dict[str, str], about: list[str]
) -> str:
    """A digest of what the bytes of a pack depend on; `about` is what only the caller knows."""
    digest = hashlib.blake2b(_VERSION.encode(), digest_size=_DIGITS // 2)
    parts = [extent_key(index, layout, names), torch.__version__, *about]
    for slot in layout.slots().values():
        parts.append(repr((slot.spec.name, slot.spec.dtype, slot.spec.shape)))
    digest.update(repr(parts).encode())
    return digest.hexdigest()


def pack_prefix(directory: Path) -> str:
    """What the names of all packs of one component's directory begin with."""
    return hashlib.blake2b(str(directory).encode(), digest_size=8).hexdigest()
