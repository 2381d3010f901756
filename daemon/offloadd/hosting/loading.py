"""Builds a pipeline from a checked directory: modules without weights, and sources of these.

Nothing is read into plain memory: weights come through the store, from the original files or from
packs, and are put into the modules by the offload engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.hosting.classes import component_class, pipeline_class
from offloadd.hosting.pack_order import PackOrder
from offloadd.hosting.packs import Packs, packed_weights, write_packs
from offloadd.hosting.plain_loading import UNFIT, load_plain, unfit
from offloadd.hosting.skeletons import NotReproducible, build_skeleton
from offloadd.hosting.weights import (
    Weights,
    fill_buffers,
    match_weights,
    stored_buffers,
    unmatched_weights,
)
from offloadd.offload.casting import Casting
from offloadd.store.index import ComponentFiles, PipelineFiles
from offloadd.store.index.pipeline import Recall
from offloadd.store.source import WeightSource

_log = logging.getLogger(__name__)

OnComponent = Callable[[int, int], None]
"""Told how many components are loaded, and of how many; may raise to stop."""


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

    def open(self, files: ComponentFiles, weights: Weights, watch: Callable[[], None]) -> Source:
        """A component's weights, or its buffers, from memory or from the files that hold them."""
        ...

    def beside_turns(self) -> AbstractContextManager[None]:
        """Time in which jobs may have the device; what is built changes the process's settings."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pipeline whose weights are elsewhere: each module's source, by the component's name.

    `buffers` are sources of what was copied into the modules; they are held so that the next
    worker finds those bytes as well.
    """

    pipeline: Any
    sources: dict[str, Source] = field(default_factory=dict)
    buffers: list[Source] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the weights."""
        for source in [*self.sources.values(), *self.buffers]:
            source.close()
        self.sources.clear()
        self.buffers.clear()


def load_pipeline(
    files: PipelineFiles, dtype: torch.dtype, supply: Supply, on_component: OnComponent
) -> Loaded:
    """The pipeline with all components; its modules cannot compute yet.

    Raises `ModelLoadFailed` with the component's name, `StorageFailed`, `OutOfMemory`; what
    `on_component` raises passes through. Nothing is left behind then.
    """
    components: dict[str, Any] = {}
    parts: list[Part] = []
    total = len(files.components)
    for component in files.components:
        with supply.beside_turns():
            on_component(0, total)
        if component.checkpoint is None:
            components[component.name] = _weightless(component)
        else:
            parts.append(build_part(component, dtype, supply))
            components[component.name] = parts[-1].module
    # One process writes what is missing of them: it takes longer to start than most packs take.
    with supply.beside_turns():
        orders = [part.order for part in parts if part.order]
        write_packs(orders, lambda: on_component(0, total), supply.recall)
    loaded = Loaded(_assemble(files, components))
    with ExitStack() as undo:
        undo.callback(loaded.close)
        for done, part in enumerate(parts, total - len(parts)):

            def watch(done: int = done) -> None:
                on_component(done, total)

            with supply.beside_turns():
                watch()
                weights, buffers = finish_part(part, supply, watch)
                loaded.buffers.extend(buffers)
                loaded.sources[part.files.name] = supply.open(part.files, weights, watch)
        on_component(total, total)
        undo.pop_all()
    return loaded


def modules(pipeline: Any) -> dict[str, nn.Module]:
    """The components that hold weights, by name."""
    return {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
    }


@dataclass(frozen=True, slots=True)
class Part:
    """A component without its weights, the weights that it wants, and the pack they come in.

    Without an order the weights are read as they lie. `buffers_in` says which files hold the
    module's buffers: the component's own, the pack, or none, where the module has them already.
    """

    files: ComponentFiles
    module: nn.Module
    weights: Weights
    order: PackOrder | None = None
    buffers_in: Literal["files", "pack", "none"] = "files"


def build_part(files: ComponentFiles, dtype: torch.dtype, supply: Supply) -> Part:
    """Build a component's module; raises `ModelLoadFailed` naming every tensor that is missing."""
    checkpoint, name = files.checkpoint, files.name
    assert checkpoint is not None  # the caller has looked
    kind = component_class(name, files.library, files.class_name)
    packs, casting = supply.packs(name), supply.casting(name)
    try:
        skeleton = build_skeleton(kind, files.directory, checkpoint, dtype)
    except NotReproducible as reason:
        _log.info("%s is loaded by its own class: %s", name, reason)
        module = load_plain(
            name, files.library, files.class_name, files.directory, checkpoint.variant, dtype
        )
        wanted = unmatched_weights(module, checkpoint, casting)
        return Part(files, module, wanted, packs.order("load", files, wanted, dtype), "none")
    except UNFIT as error:
        raise unfit(name, files.class_name, files.directory, error) from error
    module = skeleton.module
    if skeleton.names is None:
        wanted = unmatched_weights(module, checkpoint, casting)
        return Part(files, module, wanted, packs.order("load", files, wanted, dtype), "pack")
    wanted = match_weights(module, skeleton.names, checkpoint, casting)
    if wanted.is_direct:
        return Part(files, module, wanted)
    return Part(files, module, wanted, packs.order("cast", files, wanted, dtype))


def finish_part(
    part: Part, supply: Supply, watch: Callable[[], None]
) -> tuple[Weights, list[Source]]:
    """The files to read a part's weights from, once its pack is written.

    The module's buffers are copied from files where these hold them; their sources are given too.
    """
    weights = part.weights
    if part.order is not None:
        weights = packed_weights(part.order, part.weights, supply.recall)
    if part.buffers_in == "none":
        return weights, []
    held = stored_buffers(part.module, part.weights if part.buffers_in == "files" else weights)
    if not held.layout.size_bytes:
        return weights, []
    source = supply.open(part.files, held, watch)
    with ExitStack() as undo:
        undo.callback(source.close)
        fill_buffers(part.module, source)
        undo.pop_all()
    return weights, [source]


def _weightless(files: ComponentFiles) -> Any:
    kind = component_class(files.name, files.library, files.class_name)
    try:
        return kind.from_pretrained(files.directory, local_files_only=True)
    except UNFIT as error:
        raise unfit(files.name, files.class_name, files.directory, error) from error


def _assemble(files: PipelineFiles, components: dict[str, Any]) -> Any:
    kind = pipeline_class(files.class_name)
    try:
        # Everything that has files is passed in; this only reads settings and wires the parts.
        return kind.from_pretrained(files.directory, **components, local_files_only=True)
    except UNFIT as error:
        raise ModelLoadFailed(
            f"the components of {files.directory} do not make a {files.class_name}: {error}",
            hint="model_index.json and the components are of different models or versions",
        ) from error
