"""Builds a pipeline from a checked directory: modules without weights, and sources of these.

Nothing is read into plain memory: weights come through the store, from the original files or from
packs, and are put into the modules by the offload engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.hosting.loading.part_opener import PartOpener
from offloadd.hosting.loading.parts import Part, Source, Supply, build_part
from offloadd.hosting.loading.plain_loading import UNFIT, unfit
from offloadd.hosting.packs.packs import write_packs
from offloadd.hosting.sources.classes import component_class, pipeline_class
from offloadd.store.index import ComponentFiles, PipelineFiles

OnComponent = Callable[[int, int], None]
"""Told how many components are loaded, and of how many; may raise to stop."""


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
        _close([*self.sources.values(), *self.buffers])
        self.sources.clear()
        self.buffers.clear()


def load_pipeline(
    files: PipelineFiles, dtype: torch.dtype, supply: Supply, on_component: OnComponent
) -> Loaded:
    """The pipeline with all components; its modules cannot compute yet.

    Raises `ModelLoadFailed` with the component's name, `StorageFailed`, `OutOfMemory`; what
    `on_component` raises passes through. Nothing is left behind then.
    """
    sources: dict[str, Source] = {}
    buffers: list[Source] = []
    total = len(files.components)
    weightless = sum(one.checkpoint is None for one in files.components)
    with ExitStack() as undo:
        undo.callback(lambda: _close([*sources.values(), *buffers]))
        with PartOpener(supply, sources, buffers) as opener:
            components = _build(files, dtype, supply, opener, lambda: on_component(0, total))
            pipeline = _assemble(files, components)
            with supply.beside_turns():
                opener.wait(lambda done: on_component(weightless + done, total))
        on_component(total, total)
        undo.pop_all()
    return Loaded(pipeline, sources, buffers)


def _build(
    files: PipelineFiles,
    dtype: torch.dtype,
    supply: Supply,
    opener: PartOpener,
    watch: Callable[[], None],
) -> dict[str, Any]:
    """All components, modules without weights; the opener is told where these are."""
    components: dict[str, Any] = {}
    packed: list[Part] = []
    for component in files.components:
        with supply.beside_turns():
            watch()
        if component.checkpoint is None:
            components[component.name] = _weightless(component)
            continue
        part = build_part(component, dtype, supply)
        components[component.name] = part.module
        if part.order is None:
            opener.begin(part)
        else:
            packed.append(part)
    with supply.beside_turns():
        # One process writes what is missing of them: it takes longer to start than most packs take.
        write_packs([part.order for part in packed if part.order], watch, supply.recall)
    for part in packed:
        opener.begin(part)
    return components


def _close(sources: Iterable[Source]) -> None:
    for source in sources:
        source.close()


def modules(pipeline: Any) -> dict[str, nn.Module]:
    """The components that hold weights, by name."""
    return {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
    }


def _weightless(files: ComponentFiles) -> Any:
    kind = component_class(files.name, files.library, files.class_name)
    try:
        return kind.from_pretrained(files.directory, local_files_only=True)
    except UNFIT as error:
        raise unfit(files.name, files.class_name, files.directory, error) from error


def _assemble(files: PipelineFiles, components: dict[str, Any]) -> Any:
    kind = pipeline_class(files.class_name)
    given = {**components, **dict.fromkeys(files.left_out)}
    try:
        # Everything that has files is passed in; this only reads settings and wires the parts.
        return kind.from_pretrained(files.directory, **given, local_files_only=True)
    except UNFIT as error:
        raise ModelLoadFailed(
            f"the components of {files.directory} do not make a {files.class_name}: {error}",
            hint="model_index.json and the components are of different models or versions",
        ) from error
