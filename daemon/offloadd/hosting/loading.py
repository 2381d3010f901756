"""Builds a pipeline from a checked directory: modules without weights, and sources of these.

Nothing is read into plain memory: weights come through the store, from the original files or from
packs, and are put into the modules by the offload engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.hosting.classes import component_class, pipeline_class
from offloadd.hosting.packs import Packs
from offloadd.hosting.plain_loading import UNFIT, load_plain, unfit
from offloadd.hosting.skeletons import NotReproducible, Skeleton, build_skeleton
from offloadd.hosting.weights import Weights, fill_buffers, match_weights, unmatched_weights
from offloadd.offload.casting import Casting
from offloadd.store.index import ComponentFiles, PipelineFiles
from offloadd.store.reader import DiskReader
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
    def reader(self) -> DiskReader: ...

    def packs(self, component: str) -> Packs: ...

    def casting(self, component: str) -> Casting | None: ...

    def open(self, component: str, weights: Weights, watch: Callable[[], None]) -> Source: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pipeline whose weights are elsewhere: each module's source, by the component's name."""

    pipeline: Any
    sources: dict[str, Source]

    def close(self) -> None:
        """Let go of the weights."""
        for source in self.sources.values():
            source.close()
        self.sources.clear()


def load_pipeline(
    files: PipelineFiles, dtype: torch.dtype, supply: Supply, on_component: OnComponent
) -> Loaded:
    """The pipeline with all components; its modules cannot compute yet.

    Raises `ModelLoadFailed` with the component's name, `StorageFailed`, `OutOfMemory`; what
    `on_component` raises passes through. Nothing is left behind then.
    """
    components: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    total = len(files.components)
    with ExitStack() as undo:
        for done, component in enumerate(files.components):

            def watch(done: int = done) -> None:
                on_component(done, total)

            watch()
            if component.checkpoint is None:
                components[component.name] = _weightless(component)
                continue
            module, weights = load_module(component, dtype, supply, watch)
            source = supply.open(component.name, weights, watch)
            undo.callback(source.close)
            components[component.name], sources[component.name] = module, source
        on_component(total, total)
        pipeline = _assemble(files, components)
        undo.pop_all()
    return Loaded(pipeline, sources)


def modules(pipeline: Any) -> dict[str, nn.Module]:
    """The components that hold weights, by name."""
    return {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
    }


def load_module(
    files: ComponentFiles, dtype: torch.dtype, supply: Supply, watch: Callable[[], None]
) -> tuple[nn.Module, Weights]:
    """A component without its weights, and where these are, in the dtypes that it computes with."""
    checkpoint = files.checkpoint
    assert checkpoint is not None  # the caller has looked
    kind = component_class(files.name, files.library, files.class_name)
    try:
        skeleton = build_skeleton(kind, files.directory, checkpoint, dtype)
    except NotReproducible as reason:
        _log.info("%s is loaded by its own class: %s", files.name, reason)
        return _load_whole(files, dtype, supply, watch)
    except UNFIT as error:
        raise unfit(files.name, files.class_name, files.directory, error) from error
    return skeleton.module, _weights_for(files, skeleton, dtype, supply, watch)


def _weights_for(
    files: ComponentFiles,
    skeleton: Skeleton,
    dtype: torch.dtype,
    supply: Supply,
    watch: Callable[[], None],
) -> Weights:
    module, checkpoint = skeleton.module, files.checkpoint
    assert checkpoint is not None
    casting = supply.casting(files.name)
    if skeleton.names is None:
        unread = unmatched_weights(module, checkpoint, casting)
        weights = supply.packs(files.name).load(files, unread, dtype, watch)
        fill_buffers(module, weights, supply.reader)
        return weights
    weights = match_weights(module, skeleton.names, checkpoint, casting)
    fill_buffers(module, weights, supply.reader)
    if weights.is_direct:
        return weights
    return supply.packs(files.name).cast(files, weights, watch)


def _load_whole(
    files: ComponentFiles, dtype: torch.dtype, supply: Supply, watch: Callable[[], None]
) -> tuple[nn.Module, Weights]:
    checkpoint = files.checkpoint
    assert checkpoint is not None
    module = load_plain(
        files.name, files.library, files.class_name, files.directory, checkpoint.variant, dtype
    )
    unread = unmatched_weights(module, checkpoint, supply.casting(files.name))
    return module, supply.packs(files.name).load(files, unread, dtype, watch)


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
