"""What a file in the layout of a model's authors holds, from its header: component by component.

Promises: an index that comes out of here fits the component's configuration whole; its tensors are
named and shaped as diffusers has them, and each has its place in the file unless its bytes would
have to be arranged anew. Nothing but the header is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.hosting.loading.original_layout import NotInFile, convert, converts
from offloadd.hosting.loading.plain_loading import UNFIT, unfit
from offloadd.hosting.loading.skeletons import NotReproducible, blank_module
from offloadd.hosting.loading.stand_ins import class_to_build
from offloadd.hosting.loading.weights import match_weights
from offloadd.hosting.sources.classes import component_class
from offloadd.offload.weights.forms import DTYPE_NAMES, DTYPES
from offloadd.store.index import CheckpointIndex, ComponentFiles, TensorPlace
from offloadd.store.index.weight_file import refuse
from offloadd.store.layout import TensorSpec

ADAPTER_SHARE = 0.5
"""A file that has so many LoRA matrices among its tensors is an adapter."""


@dataclass(frozen=True, slots=True)
class OriginalFile:
    """A checked file by its tensors' own names."""

    index: CheckpointIndex

    @property
    def is_adapter(self) -> bool:
        """Whether it holds a LoRA and no model."""
        names = self.index.tensors
        pairs = sum("lora" in name.lower() for name in names)
        return bool(names) and pairs >= ADAPTER_SHARE * len(names)

    def component(self, asked: ComponentFiles) -> ComponentFiles | None:
        """The component with the weights that this file has of it; None where it has none.

        Raises `ModelLoadFailed` for weights that do not fit the component's configuration.
        """
        kind = component_class(asked.name, asked.library, asked.class_name)
        if not issubclass(kind, nn.Module):
            return None
        kind, module = _built(asked, kind)
        if not converts(kind, self.index.tensors):
            return None
        try:
            index = self._converted(kind, module, asked)
        except NotInFile:
            return None
        _check_fit(module, index, asked)
        return replace(asked, checkpoint=index, weights_place=index.location)

    def whole(self, asked: ComponentFiles) -> ComponentFiles:
        """The component with this file's weights, which are its own alone.

        The file may be in either layout. Raises `ModelLoadFailed` where it is another model's.
        """
        found = self.component(asked)
        if found is not None:
            return found
        place = place_of(self.index.location, asked.name)
        given = replace(asked, checkpoint=self.index, weights_place=place)
        kind, module = _built(asked, component_class(asked.name, asked.library, asked.class_name))
        if not self.index.tensors.keys() & module.state_dict().keys() and not _may_rename(kind):
            raise refuse(
                self.index.location,
                f"has no weights of component {asked.name!r} ({asked.class_name})",
                "take a file of this component, in diffusers' layout or in its authors'",
                kind="other_component",
                component=asked.name,
            )
        if not _may_rename(kind):
            match_weights(module, {name: name for name in self.index.tensors}, self.index)
        return given

    def _converted(
        self, kind: type[Any], module: nn.Module, asked: ComponentFiles
    ) -> CheckpointIndex:
        blanks = {
            name: torch.empty(place.spec.shape, dtype=DTYPES[place.spec.dtype], device="meta")
            for name, place in self.index.tensors.items()
        }
        owners = {blank.untyped_storage()._cdata: name for name, blank in blanks.items()}
        places: dict[str, TensorPlace] = {}
        unplaced: set[str] = set()
        for name, tensor in convert(kind, module, asked.directory, blanks).items():
            spec = TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            owner = owners.get(tensor.untyped_storage()._cdata)
            if owner is None or not tensor.is_contiguous() or tensor.dtype != blanks[owner].dtype:
                unplaced.add(name)
                places[name] = TensorPlace(spec, 0, 0)
                continue
            held = self.index.tensors[owner]
            start_bytes = held.start_bytes + int(tensor.storage_offset()) * tensor.element_size()
            places[name] = TensorPlace(spec, held.file_index, start_bytes)
        return CheckpointIndex(
            location=place_of(self.index.location, asked.name),
            files=self.index.files,
            tensors=places,
            metadata={},
            is_original=True,
            unplaced=frozenset(unplaced),
        )


def place_of(file: Path, component: str) -> Path:
    """How the weights that a file has of one component are called, in messages and for recall."""
    return file / component


def _built(asked: ComponentFiles, kind: type[Any]) -> tuple[type[Any], nn.Module]:
    try:
        kind = class_to_build(asked.name, kind, asked.directory)
        return kind, blank_module(kind, asked.directory)
    except NotReproducible as reason:
        raise ModelLoadFailed(
            f"component {asked.name!r} cannot be hosted from a single file: {reason}",
            hint="take the model as a directory that save_pretrained of its pipeline wrote",
            details={"component": asked.name, "path": str(asked.directory)},
        ) from reason
    except UNFIT as error:
        raise unfit(asked.name, asked.class_name, asked.directory, error) from error


def _check_fit(module: nn.Module, index: CheckpointIndex, asked: ComponentFiles) -> None:
    try:
        match_weights(module, {name: name for name in index.tensors}, index)
    except ModelLoadFailed as error:
        config = asked.directory / "config.json"
        raise ModelLoadFailed(
            f"{index.location.parent} does not fit {config}: of component {asked.name!r} "
            f"({asked.class_name}) it {_told(error)}",
            hint="name the configuration of this very model as `config`: the file may be of "
            "another size or version, or hold only a part",
            details={**error.details, "component": asked.name, "config": str(config)},
        ) from error


def _told(error: ModelLoadFailed) -> str:
    missing: list[str] = list(error.details.get("missing") or ())
    misshaped: Mapping[str, Any] = error.details.get("misshaped") or {}
    parts = []
    if missing:
        parts.append(f"lacks {len(missing)} tensors, such as {missing[0]}")
    if misshaped:
        name, shapes = next(iter(misshaped.items()))
        parts.append(
            f"has {len(misshaped)} tensors of other shapes, such as {name}: "
            f"{shapes['found']}, where the configuration says {shapes['expected']}"
        )
    return " and ".join(parts)


def _may_rename(kind: type[Any]) -> bool:
    # Loading a transformers model may rename what its files hold.
    return kind.__module__.startswith("transformers.")
