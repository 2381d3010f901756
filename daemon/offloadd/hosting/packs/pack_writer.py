"""Writes packs: `python -m offloadd.hosting.packs.pack_writer`, orders on stdin, answer on stdout.

The libraries that models come from are imported only where one of their classes has to load.
"""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from typing_extensions import Buffer

from offload_protocol.codec import error_info
from offload_protocol.errors import ModelLoadFailed, OffloadError, OutOfMemory
from offloadd.channel.parent import end_with_parent
from offloadd.hosting.packs.pack_order import PackAnswer, PackOrder
from offloadd.offload.host_memory import view_of
from offloadd.offload.weights.forms import DTYPE_NAMES, DTYPES
from offloadd.offload.weights.packed import packed_form
from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.index import read_checkpoint
from offloadd.store.layout import TensorSlot, TensorSpec, lay_out
from offloadd.store.pack import PackEntry, write_pack
from offloadd.store.pack_cache import pack_metadata
from offloadd.store.reader import DiskReader


def main() -> None:
    """Take orders, carry them out, answer."""
    end_with_parent()
    answers = os.dup(1)
    # What libraries print belongs into the log, not into the answer.
    os.dup2(2, 1)
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=list[PackOrder])
    os.write(answers, msgspec.json.encode(_carry_out(orders)))


def _carry_out(orders: list[PackOrder]) -> PackAnswer:
    for order in orders:
        try:
            _WRITERS[order.how](order)
        except OffloadError as error:
            return PackAnswer(error=error_info(error))
        except MemoryError:
            failed = OutOfMemory(f"there is too little memory to pack {order.component!r}")
            return PackAnswer(error=error_info(failed))
    return PackAnswer()


def _write_cast(order: PackOrder) -> None:
    index = read_checkpoint(Path(order.location))
    wanted = order.layout().slots()
    stored = lay_out(
        [
            (
                unit.name,
                [
                    TensorSpec(name, index.tensors[order.names.get(name, name)].spec.dtype, shape)
                    for name, _, shape in unit.tensors
                ],
            )
            for unit in order.units
        ]
    )
    with DiskReader() as reader:
        source = CheckpointSource(index, stored, reader, names=order.names)
        entries = [
            _cast_entry(source, slot, wanted[slot.spec.name].spec, order.through)
            for slot in stored.slots().values()
        ]
        write_pack(Path(order.path), entries, pack_metadata(order.files))
        source.close()


def _cast_entry(
    source: CheckpointSource, slot: TensorSlot, wanted: TensorSpec, through: dict[str, str]
) -> PackEntry:
    def produce() -> Buffer:
        plain = torch.empty(slot.spec.size_bytes, dtype=torch.uint8)
        source.read(slot.offset_bytes, slot.stop_bytes, view_of(plain)).result()
        stored = plain.view(DTYPES[slot.spec.dtype])
        computed = stored.to(DTYPES[through.get(wanted.name, wanted.dtype)])
        return _bytes_of(computed.to(DTYPES[wanted.dtype]))

    return PackEntry(wanted, produce)


def _write_loaded(order: PackOrder) -> None:
    module = _loaded(order)
    entries = [*_loaded_weights(order, module), *_loaded_buffers(module)]
    write_pack(Path(order.path), entries, pack_metadata(order.files))


def _loaded(order: PackOrder) -> torch.nn.Module:
    from offloadd.hosting.loading.plain_loading import load_from_gguf, load_plain
    from offloadd.hosting.quantization.gguf_files import is_gguf

    what = (order.component, order.library, order.class_name, Path(order.directory))
    weights, dtype = Path(order.location), getattr(torch, order.dtype)
    if is_gguf(weights):
        return load_from_gguf(*what, weights, dtype)
    return load_plain(*what, order.variant, dtype, order.quantization)


def _loaded_weights(order: PackOrder, module: torch.nn.Module) -> Iterator[PackEntry]:
    tensors = dict(module.named_parameters(remove_duplicate=False))
    wanted = order.layout().slots()
    served = {id(tensors[name]) for name in wanted if name in tensors}
    if surplus := [name for name, one in tensors.items() if id(one) not in served]:
        raise ModelLoadFailed(
            f"component {order.component!r}: {order.class_name} loads {surplus[0]!r}, which its "
            "configuration does not give it",
            hint="models whose parts depend on more than config.json are not hosted",
            details={"component": order.component, "tensors": surplus},
        )
    for name, slot in wanted.items():
        tensor = tensors.get(name)
        found = None if tensor is None else _stored_as(tensor)
        expected = order.through.get(name, slot.spec.dtype)
        if tensor is None or found != (expected, slot.spec.shape):
            raise ModelLoadFailed(
                f"component {order.component!r}: {order.class_name} loads {name!r} as {found}, not "
                f"as {expected} {list(slot.spec.shape)}",
                hint="host the model in the dtype of its files",
                details={"component": order.component, "tensor": name},
            )
        yield _entry(slot.spec, tensor)


def _loaded_buffers(module: torch.nn.Module) -> Iterator[PackEntry]:
    # Those too that checkpoints leave out: loading may have computed them from weights.
    for name, buffer in module.named_buffers():
        if (dtype := DTYPE_NAMES.get(buffer.dtype)) is not None:
            yield _entry(TensorSpec(name, dtype, tuple(buffer.shape)), buffer)


def _write_converted(order: PackOrder) -> None:
    from safetensors.torch import load_file

    from offloadd.hosting.loading.original_layout import convert
    from offloadd.hosting.loading.skeletons import blank_module
    from offloadd.hosting.loading.stand_ins import class_to_build
    from offloadd.hosting.sources.classes import component_class

    directory = Path(order.directory)
    kind = component_class(order.component, order.library, order.class_name)
    kind = class_to_build(order.component, kind, directory)
    # The file is mapped, and what is not packed is never looked at.
    tensors = convert(kind, blank_module(kind, directory), directory, load_file(order.location))
    entries = [
        _converted_entry(slot.spec, tensors[order.names.get(name, name)], order.through.get(name))
        for name, slot in order.layout().slots().items()
    ]
    write_pack(Path(order.path), entries, pack_metadata(order.files))


def _converted_entry(spec: TensorSpec, tensor: torch.Tensor, through: str | None) -> PackEntry:
    def produce() -> Buffer:
        computed = tensor.to(DTYPES[through or spec.dtype])
        return _bytes_of(computed.to(DTYPES[spec.dtype]))

    return PackEntry(spec, produce)


def _write_unpickled(order: PackOrder) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for file in order.files:
        for name, value in _unpickled(Path(file.path)).items():
            if not isinstance(value, torch.Tensor) or value.dtype not in DTYPE_NAMES:
                raise _refused(Path(file.path), f"{name!r} is no tensor that a pack can hold")
            tensors[str(name)] = value
    entries = [
        _entry(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)), tensor)
        for name, tensor in tensors.items()
    ]
    write_pack(Path(order.path), entries, pack_metadata(order.files))


def _unpickled(path: Path) -> dict[Any, Any]:
    # Mapped, so that only what is being written is in memory; files of before torch 1.6 cannot be.
    can_be_mapped = zipfile.is_zipfile(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=can_be_mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise _refused(path, " ".join(str(error).split())[:300]) from error
    # Trainers put the weights beside their own state, some more than once.
    while isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict):
        raise _refused(path, f"it holds a {type(found).__name__}, not named tensors")
    return found


def _refused(path: Path, why: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{path} cannot be taken as weights only: {why}",
        hint="take the model in safetensors form; nothing but tensors is read from pickles",
        details={"path": str(path), "kind": "pickle"},
    )


def _stored_as(tensor: torch.Tensor) -> tuple[str | None, tuple[int, ...]]:
    packed = packed_form(tensor)
    if packed is not None:
        spec = packed.spec("")
        return spec.dtype, spec.shape
    return DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape)


def _entry(spec: TensorSpec, tensor: torch.Tensor) -> PackEntry:
    packed = packed_form(tensor)
    if packed is not None:
        return PackEntry(spec, lambda: _bytes_of(packed.stored(tensor)))
    return PackEntry(spec, lambda: _bytes_of(tensor.to(DTYPES[spec.dtype])))


def _bytes_of(tensor: torch.Tensor) -> Buffer:
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return cast(Buffer, flat)


_WRITERS: dict[str, Callable[[PackOrder], None]] = {
    "cast": _write_cast,
    "load": _write_loaded,
    "convert": _write_converted,
    "unpickle": _write_unpickled,
}

if __name__ == "__main__":
    main()
