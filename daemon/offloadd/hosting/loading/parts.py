"""A component without its weights, what it wants of them, and where these are to be had.

Raises name every tensor that is missing or has another shape, before a byte of it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.channel.specs import QuantizationSpec
from offloadd.hosting.loading.plain_loading import UNFIT, unfit
from offloadd.hosting.loading.skeletons import NotReproducible, Skeleton, build_skeleton
from offloadd.hosting.loading.stand_ins import class_to_build
from offloadd.hosting.loading.weights import (
    Weights,
    fill_buffers,
    loaded_buffers,
    match_weights,
    stored_buffers,
    unmatched_weights,
)
from offloadd.hosting.packs.pack_order import How, PackOrder
from offloadd.hosting.packs.packs import Packs, packed_weights
from offloadd.hosting.quantization.gguf_files import is_gguf
from offloadd.hosting.sources.classes import component_class
from offloadd.offload.weights.casting import Casting
from offloadd.store.index import ComponentFiles
from offloadd.store.index.pipeline import Recall
from offloadd.store.source import WeightSource


class Source(WeightSource, Protocol):
    """A source that is to be closed once nothing reads it."""

    def close(self) -> None: ...


class Supply(Protocol):
    """Where loading gets weights from."""

    @property
    def recall(self) -> Recall:
        """Asks for what is known of weights in memory, whose files may be gone."""
        ...

    def packs(self, component: str) -> Packs: ...

    def casting(self, component: str) -> Casting | None: ...

    def quantization(self, component: str) -> QuantizationSpec | None: ...

    def open(self, files: ComponentFiles, weights: Weights, watch: Callable[[], None]) -> Source:
        """A component's weights, or its buffers, from memory or from the files that hold them."""
        ...

    def beside_turns(self) -> AbstractContextManager[None]:
        """Time in which jobs may have the device; what is built changes the process's settings."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A component without its weights, the weights that it wants, and the pack they come in.

    Without an order the weights are read as they lie. `is_loaded` says that the pack holds what the
    class's own `from_pretrained` loads, buffers included; otherwise the component's files hold
    these.
    """

    files: ComponentFiles
    module: nn.Module
    weights: Weights
    order: PackOrder | None = None
    is_loaded: bool = False


def build_part(files: ComponentFiles, dtype: torch.dtype, supply: Supply) -> Part:
    """Build a component's module; raises `ModelLoadFailed` naming every tensor that is missing.

    What only the class itself can read is never loaded here: the writer of packs does it, beside
    the turns of others and with settings that it may change.
    """
    checkpoint, name = files.checkpoint, files.name
    assert checkpoint is not None  # the caller has looked
    packs, casting = supply.packs(name), supply.casting(name)
    quantization = supply.quantization(name)
    skeleton = skeleton_of(files, dtype, quantization)
    module = skeleton.module
    if skeleton.names is None:
        wanted = unmatched_weights(module, checkpoint, casting)
        order = packs.order(
            "load", files, wanted, dtype, quantization if skeleton.quantised else None
        )
        return Part(files, module, wanted, order, True)
    wanted = match_weights(module, skeleton.names, checkpoint, casting)
    if wanted.is_direct:
        return Part(files, module, wanted)
    how: How = "convert" if checkpoint.is_original else "cast"
    return Part(files, module, wanted, packs.order(how, files, wanted, dtype))


def skeleton_of(
    files: ComponentFiles, dtype: torch.dtype, quantization: QuantizationSpec | None = None
) -> Skeleton:
    """A component's module without its weights; raises `ModelLoadFailed` if it cannot be built."""
    checkpoint, name = files.checkpoint, files.name
    assert checkpoint is not None  # the caller has looked
    kind = component_class(name, files.library, files.class_name)
    try:
        built = class_to_build(name, kind, files.directory)
        skeleton = build_skeleton(built, files.directory, checkpoint, dtype, quantization)
        is_read_by_class = skeleton.names is None and not is_gguf(checkpoint.location)
        if is_read_by_class and files.weights_place is not None:
            # Its class reads directories, and would take the weights that lie in this one.
            raise NotReproducible(
                f"its weights in {checkpoint.location} have to be "
                f"{'quantised' if skeleton.quantised else 'converted'} as a directory is loaded"
            )
        return skeleton
    except NotReproducible as reason:
        raise ModelLoadFailed(
            f"component {name!r} cannot be hosted: {reason}",
            hint="take the model with components of diffusers' and transformers' model classes",
            details={"component": name, "path": str(files.directory)},
        ) from reason
    except UNFIT as error:
        raise unfit(name, files.class_name, files.directory, error) from error


def finish_part(
    part: Part, supply: Supply, watch: Callable[[], None]
) -> tuple[Weights, list[Source]]:
    """The files to read a part's weights from, once its pack is written.

    The module's buffers are copied from files where these hold them; their sources are given too.
    """
    weights = part.weights
    if part.order is not None:
        weights = packed_weights(part.order, part.weights, supply.recall)
    if part.is_loaded:
        held = loaded_buffers(part.module, weights)
    else:
        is_beside = weights.index.is_original
        held = stored_buffers(part.module, weights if is_beside else part.weights)
    if not held.layout.size_bytes:
        return weights, []
    source = supply.open(part.files, held, watch)
    with ExitStack() as undo:
        undo.callback(source.close)
        fill_buffers(part.module, source, as_stored=part.is_loaded)
        undo.pop_all()
    return weights, [source]
