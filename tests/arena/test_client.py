"""A worker opens weights in the arena and finds them bit for bit."""

from __future__ import annotations

from pathlib import Path

from store.checkpoints import arrays, assert_holds, layout_of, write_file

from offloadd.store.arena.client import ArenaClient
from offloadd.store.index import read_checkpoint
from offloadd.store.reader import DiskReader


def test_an_opened_extent_holds_every_tensor(tmp_path: Path) -> None:
    tensors = arrays({"a": (300, 7), "b": (5,), "c": (64, 64)})
    index = read_checkpoint(write_file(tmp_path / "model.safetensors", tensors))
    with DiskReader(threads=1) as reader:
        source = ArenaClient(reader).open(index, layout_of(index))
        view = source.host_view()
        assert view is not None
        assert view.readonly
        assert_holds(view, source.layout, tensors)
        source.close()
