"""Packs of weights that cannot be used as they lie, each written once by a process of its own.

Promises: a pack that is found serves exactly the files, class and dtypes that it was written for;
one that these have outgrown is deleted when its successor is written. The writer is a child, so
that its memory is returned whole, and it ends with this process.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import diffusers
import msgspec
import torch
import transformers

from offload_protocol.codec import to_exception
from offload_protocol.errors import InternalError, StorageFailed
from offloadd.hosting.dtypes import dtype_name
from offloadd.hosting.pack_order import (
    PackAnswer,
    PackOrder,
    pack_key,
    pack_prefix,
    packed_units,
)
from offloadd.hosting.weights import Weights
from offloadd.store.index import ComponentFiles, read_checkpoint

_LOOK_EVERY_S = 0.1
_WRITER = "offloadd.hosting.pack_writer"


@dataclass(frozen=True, slots=True)
class Packs:
    """The packs in one directory."""

    directory: Path

    def cast(self, files: ComponentFiles, weights: Weights, watch: Callable[[], None]) -> Weights:
        """The weights in the dtypes of their layout; `watch` is called while a writer works.

        Raises `StorageFailed` where the pack cannot be written, and what `watch` raises.
        """
        return self._packed("cast", files, weights, "", watch)

    def load(
        self,
        files: ComponentFiles,
        weights: Weights,
        dtype: torch.dtype,
        watch: Callable[[], None],
    ) -> Weights:
        """The weights as `from_pretrained` reads them; raises also what that raises."""
        return self._packed("load", files, weights, dtype_name(dtype), watch)

    def _packed(
        self,
        how: Literal["cast", "load"],
        files: ComponentFiles,
        weights: Weights,
        dtype: str,
        watch: Callable[[], None],
    ) -> Weights:
        names = dict(weights.names)
        through = dict(weights.through)
        about = [how, files.library, files.class_name, dtype, repr(sorted(through.items()))]
        about += _loaders(how, files.directory)
        key = pack_key(weights.index, weights.layout, names, about)
        prefix = pack_prefix(files.directory)
        path = self.directory / f"{prefix}-{key}.safetensors"
        if not path.exists():
            order = PackOrder(
                path=str(path),
                key=key,
                how=how,
                component=files.name,
                library=files.library,
                class_name=files.class_name,
                directory=str(files.directory),
                variant=weights.index.variant,
                dtype=dtype,
                units=packed_units(weights.layout),
                names=names,
                through=through,
            )
            _write(order, watch)
            for older in self.directory.glob(f"{prefix}-*.safetensors"):
                if older != path:
                    older.unlink(missing_ok=True)
        return Weights(read_checkpoint(path), weights.layout, {}, {})


def cache_directory() -> Path:
    """Where packs go unless a model says otherwise: the service's or the user's cache."""
    if given := os.environ.get("CACHE_DIRECTORY"):
        # systemd separates several directories by colons.
        return Path(given.partition(":")[0]) / "packs"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "offloadd" / "packs"


def _loaders(how: str, directory: Path) -> list[str]:
    if how == "cast":
        return []
    config = (directory / "config.json").read_bytes()
    return [diffusers.__version__, transformers.__version__, hashlib.sha256(config).hexdigest()]


def _write(order: PackOrder, watch: Callable[[], None]) -> None:
    command = [sys.executable, "-P", "-m", _WRITER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        try:
            said = _converse(writer, msgspec.json.encode(order), watch)
        except BaseException:
            writer.kill()
            raise
    try:
        answer = msgspec.json.decode(said, type=PackAnswer)
    except msgspec.DecodeError:
        raise InternalError(
            f"the writer of the pack for {order.component!r} ended with status {writer.returncode}",
            hint="the daemon's log may say why; there may have been too little memory",
        ) from None
    if answer.error is not None:
        raise to_exception(answer.error)
    if not Path(order.path).exists():
        raise StorageFailed(f"{order.path} vanished while it was written")


def _converse(writer: subprocess.Popen[bytes], order: bytes, watch: Callable[[], None]) -> bytes:
    given: bytes | None = order
    while True:
        watch()
        try:
            said, _ = writer.communicate(given, timeout=_LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            given = None
        else:
            return said
