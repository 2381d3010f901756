"""Layerwise casting: weights stored and transferred in fp8, cast on the device before use.

The rule of which weights are cast is that of diffusers' `enable_layerwise_casting`, and so are the
numbers: the module's weights, in the dtype that it computes in, are rounded once to the storage
dtype. Differences, both in favour of right numbers: a cast weight always answers the compute dtype
(so that adapters, and code that asks a layer for its dtype, do not see fp8), and the order of
casting, offloading and loading adapters cannot matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from typing_extensions import Buffer

from offload_protocol.errors import InvalidRequest
from offloadd.offload.grouping.ties import OwnedTensor
from offloadd.offload.host_memory import view_of
from offloadd.offload.weights.forms import DTYPE_NAMES, DTYPES
from offloadd.store.layout import Layout, TensorSlot, TensorSpec
from offloadd.store.pack import PackEntry
from offloadd.store.source import WeightSource

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
"""What weights can be stored in, by the names that a configuration uses."""

CAST_LAYERS = (
    nn.Linear,
    nn.Embedding,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""The layers whose weights are cast; all others (norms above all) are too small and too precise."""

SKIPPED_PATHS = ("pos_embed", "patch_embed", "norm", "^proj_in$", "^proj_out$")
"""What is skipped in every model, as regular expressions searched for in module paths."""

ADAPTER_PARTS = (
    *("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"),
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
)
"""The parts of adapter layers, which keep their dtype."""


_CASTABLE = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class Casting:
    """What weights are stored in, and what of the module is left out.

    `skip_patterns` (regular expressions) replaces the default patterns; what the module's class
    itself asks to be skipped is skipped in any case. Raises InvalidRequest for another dtype or a
    pattern that is none.
    """

    storage: torch.dtype
    skip_patterns: tuple[str, ...] | None = None
    skip_classes: tuple[type[nn.Module], ...] = ()

    def __post_init__(self) -> None:
        if self.storage not in STORAGE_DTYPES.values():
            raise InvalidRequest(
                f"weights cannot be stored in {str(self.storage).removeprefix('torch.')}",
                hint=f"storage_dtype is one of: {', '.join(STORAGE_DTYPES)}",
            )
        for pattern in self.skip_patterns or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise InvalidRequest(
                    f"{pattern!r} is no regular expression: {error}",
                    hint="skip patterns are searched for in module paths",
                ) from error

    def cast_modules(self, module: nn.Module) -> list[nn.Module]:
        """The layers of a module whose weights and buffers are cast, in module order."""
        patterns = [re.compile(pattern) for pattern in self.patterns_of(module)]
        return list(self._cast_below(module, "", patterns))

    def patterns_of(self, module: nn.Module) -> tuple[str, ...]:
        """All patterns that apply to a module, each once."""
        defaults = (*SKIPPED_PATHS, *ADAPTER_PARTS)
        own = (
            getattr(module, "_keep_in_fp32_modules", None) or (),
            getattr(module, "_skip_layerwise_casting_patterns", None) or (),
        )
        chosen = defaults if self.skip_patterns is None else self.skip_patterns
        return tuple(dict.fromkeys([*chosen, *own[0], *own[1]]))

    def _cast_below(
        self, module: nn.Module, path: str, patterns: list[re.Pattern[str]]
    ) -> Iterator[nn.Module]:
        if isinstance(module, self.skip_classes) or any(p.search(path) for p in patterns):
            return
        if isinstance(module, CAST_LAYERS):
            # Whatever such a layer has inside is cast with it.
            yield from module.modules()
            return
        for name, child in module.named_children():
            yield from self._cast_below(child, f"{path}.{name}" if path else name, patterns)


@dataclass(frozen=True, slots=True)
class StoredAs:
    """Weights that are stored as a layout says, whatever the module computes in.

    For a module whose dtype was changed after its weights were stored.
    """

    layout: Layout


def store_cast(
    module: nn.Module, owned: Sequence[OwnedTensor], casting: Casting | StoredAs
) -> None:
    """Let those of a module's tensors that are cast be stored in the storage dtype."""
    if isinstance(casting, StoredAs):
        slots = casting.layout.slots()
        for tensor in owned:
            if tensor.kind == "parameter":
                tensor.spec = slots[tensor.spec.name].spec
                tensor.size_bytes = tensor.spec.size_bytes
        return
    cast_ids = {id(layer) for layer in casting.cast_modules(module)}
    modules = dict(module.named_modules(remove_duplicate=False))
    for tensor in owned:
        if tensor.kind != "parameter" or tensor.spec.dtype not in _CASTABLE:
            continue
        holders = [tensor.owner, *(path for path, _ in tensor.aliases)]
        if any(id(modules[path]) in cast_ids for path in holders):
            spec = tensor.spec
            tensor.spec = TensorSpec(spec.name, DTYPE_NAMES[casting.storage], spec.shape)
            tensor.size_bytes = tensor.spec.size_bytes


def round_buffers(module: nn.Module, casting: Casting) -> None:
    """Round the buffers of cast layers to what the storage dtype can hold of them."""
    for layer in casting.cast_modules(module):
        for name, buffer in layer._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                layer._buffers[name] = buffer.to(casting.storage).to(buffer.dtype)


def cast_entries(source: WeightSource, stored: Layout) -> Iterator[PackEntry]:
    """The entries of a pack that holds a source's weights in another layout's dtypes.

    `source` has the module's own dtypes (`module_layout(module)`), `stored` those to store
    (`module_layout(module, casting)`). One tensor at a time is read and cast, on the host; what
    reading raises comes out of `PackEntry.produce`.
    """
    wanted = stored.slots()
    for unit in source.layout.units:
        for slot in unit.tensors:
            yield _cast_entry(source, slot, wanted[slot.spec.name].spec)


def _cast_entry(source: WeightSource, slot: TensorSlot, stored: TensorSpec) -> PackEntry:
    def produce() -> Buffer:
        plain = torch.empty(slot.spec.size_bytes, dtype=torch.uint8)
        source.read(slot.offset_bytes, slot.stop_bytes, view_of(plain)).result()
        if stored.dtype == slot.spec.dtype:
            return cast(Buffer, plain.numpy())
        rounded = plain.view(DTYPES[slot.spec.dtype]).to(DTYPES[stored.dtype])
        return cast(Buffer, rounded.view(torch.uint8).numpy())

    return PackEntry(stored, produce)
