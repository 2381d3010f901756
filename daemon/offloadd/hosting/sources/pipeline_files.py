"""The files of a model as its settings name them: a directory, one file, others for components.

Needs no weights: what is returned has been checked against the headers of all files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from diffusers.loaders.single_file import SINGLE_FILE_OPTIONAL_COMPONENTS
from torch import nn

from offload_protocol.errors import InvalidRequest, ModelLoadFailed
from offloadd.channel.specs import ModelSpec
from offloadd.hosting.quantization.gguf_files import index_gguf, is_gguf
from offloadd.hosting.sources.classes import component_class
from offloadd.hosting.sources.guessed_config import guessed_config
from offloadd.hosting.sources.original_files import OriginalFile, place_of
from offloadd.hosting.sources.sources import source_directory
from offloadd.store.index import (
    CheckpointIndex,
    ComponentFiles,
    PipelineFiles,
    inspect_pipeline,
    read_checkpoint,
)
from offloadd.store.index.naming import PICKLE_SUFFIXES, choose_weights
from offloadd.store.index.pipeline import GONE, Recall, Unpickle, nothing_recalled
from offloadd.store.index.weight_file import refuse

_SUFFIXES = (".safetensors", *PICKLE_SUFFIXES)

FindSource = Callable[[str, str | None], Path]
"""The directory or file of a source and revision."""


@dataclass(frozen=True, slots=True)
class Finder:
    """Finds models' files; `recall` and `unpickle` are as in `inspect_pipeline`."""

    recall: Recall = nothing_recalled
    unpickle: Unpickle = nothing_recalled
    find_source: FindSource = source_directory

    def find(self, spec: ModelSpec) -> PipelineFiles:
        """The model's files.

        Raises `ModelLoadFailed` for a source that cannot be hosted, `InvalidRequest` for settings
        that do not go with it, `StorageFailed` for a disk that cannot be read.
        """
        unpickle = self.unpickle if spec.weights_only else nothing_recalled
        single = _single_file(spec.source)
        own = _OwnSources(spec, self, unpickle)
        if single is None:
            if spec.config is not None:
                raise InvalidRequest(
                    f"model {spec.name!r}: config goes with a single-file checkpoint, and "
                    f"{spec.source} is none",
                    hint="leave config out: a pipeline's directory has its own configurations",
                )
            found = inspect_pipeline(
                self.find_source(spec.source, spec.revision),
                variant=spec.variant,
                recall=self.recall,
                unpickle=unpickle,
                given=own.given,
            )
        else:
            found = self._from_single_file(spec, single, own, unpickle)
        own.check_used()
        return found

    def _from_single_file(
        self, spec: ModelSpec, path: Path, own: _OwnSources, unpickle: Unpickle
    ) -> PipelineFiles:
        if spec.config is None:
            raise self._without_config(path, unpickle)
        directory = self.find_source(spec.config, None)
        parts = _Parts(self, path, unpickle, own)
        found = inspect_pipeline(
            directory,
            variant=spec.variant,
            recall=self.recall,
            unpickle=unpickle,
            given=parts.given,
            without=SINGLE_FILE_OPTIONAL_COMPONENTS,
        )
        parts.check(found)
        return found

    def _without_config(self, path: Path, unpickle: Unpickle) -> ModelLoadFailed:
        guessed = guessed_config(self.read(path, unpickle).index.tensors)
        known = f"; this file seems to be of the kind of {guessed}" if guessed else ""
        return refuse(
            path,
            "is a single-file checkpoint, and no configuration was named",
            "set config to a diffusers directory of this model's kind, or to its name in the hub "
            f"cache; weights are not needed there{known}",
            kind="no_config",
            guessed=guessed,
        )

    def read(self, path: Path, unpickle: Unpickle) -> OriginalFile:
        """A file of weights, checked; an adapter is refused."""
        try:
            index = read_checkpoint(path)
        except ModelLoadFailed as error:
            made = unpickle(path, None) if error.details.get("kind") == "pickle" else None
            if made is None:
                raise
            index = replace(made, location=path)
        file = OriginalFile(index)
        if file.is_adapter:
            raise refuse(
                path,
                "is an adapter (LoRA), not a model",
                "name it under `adapters` of the model that it was trained for",
                kind="adapter",
            )
        return file

    def recalled(self, place: Path, error: ModelLoadFailed) -> CheckpointIndex | None:
        """What is in memory of weights whose file is gone."""
        return self.recall(place, None) if error.details.get("kind") in GONE else None


@dataclass(slots=True)
class _OwnSources:
    """The components whose settings name a source."""

    spec: ModelSpec
    finder: Finder
    unpickle: Unpickle
    used: set[str] = field(default_factory=set)

    def given(self, asked: ComponentFiles) -> ComponentFiles | None:
        """The component's weights, or None where the model's own source has them."""
        own = self.spec.components.get(asked.name)
        if own is None or own.source is None:
            return None
        self.used.add(asked.name)
        source = Path(own.source)
        if is_gguf(source) and not source.is_dir():
            return self._from_gguf(asked, source)
        if source.is_dir():
            index = read_checkpoint(source, variant=self.spec.variant)
            return replace(asked, directory=source, checkpoint=index)
        try:
            file = self.finder.read(source, self.unpickle)
        except ModelLoadFailed as error:
            place = place_of(source, asked.name)
            index_there = self.finder.recalled(place, error)
            if index_there is None:
                raise
            return replace(asked, checkpoint=index_there, weights_place=place)
        _require_config(asked, source)
        return file.whole(asked)

    def _from_gguf(self, asked: ComponentFiles, file: Path) -> ComponentFiles:
        _require_config(asked, file)
        try:
            index: CheckpointIndex | None = index_gguf(file)
        except ModelLoadFailed as error:
            index = self.finder.recalled(file, error)
            if index is None:
                raise
        return replace(asked, checkpoint=index, weights_place=file)

    def check_used(self) -> None:
        """Raise `InvalidRequest` for a source of a component that the model does not have."""
        named = {name for name, one in self.spec.components.items() if one.source is not None}
        for name in sorted(named - self.used):
            raise InvalidRequest(
                f"model {self.spec.name!r} has no component {name!r} that could have a source",
                hint="name a component of model_index.json",
            )


@dataclass(slots=True)
class _Parts:
    """The components of a whole pipeline in one file."""

    finder: Finder
    path: Path
    unpickle: Unpickle
    own: _OwnSources
    held: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    _file: OriginalFile | None = None

    def given(self, asked: ComponentFiles) -> ComponentFiles | None:
        """The component with its weights from the file, or None if it is to come from elsewhere."""
        if (own := self.own.given(asked)) is not None:
            return own
        if not issubclass(component_class(asked.name, asked.library, asked.class_name), nn.Module):
            return None
        _require_config(asked, self.path)
        found = self._recalled(asked) or self._read().component(asked)
        if found is not None:
            self.held.append(asked.name)
            return found
        if choose_weights([one.name for one in asked.directory.iterdir()], None) is None:
            # Not raised here, so that all that is lacking is told at once.
            self.lacking[asked.name] = asked.class_name
            return asked
        return None

    def check(self, found: PipelineFiles) -> None:
        """Raise `ModelLoadFailed` where components have weights nowhere."""
        if not self.lacking and self.held:
            return
        there = f"holds weights of {', '.join(self.held)}" if self.held else "holds no weights"
        told = ", ".join(f"{name} ({kind})" for name, kind in self.lacking.items())
        lacking = f", but none of {told}" if self.held and told else f" of a {found.class_name}"
        raise refuse(
            self.path,
            there + lacking,
            f"put the weights of what is missing into its folder of {found.directory}; or host "
            "that model and take the file as the source of one component: "
            f"components.{(self.held or ['transformer'])[0]}.source"
            if self.held
            else "check that config names the configuration of this file's model; diffusers may "
            "not know how to convert it",
            kind="lacks_components",
            held=self.held,
            missing=list(self.lacking),
        )

    def _read(self) -> OriginalFile:
        if self._file is None:
            self._file = self.finder.read(self.path, self.unpickle)
        return self._file

    def _recalled(self, asked: ComponentFiles) -> ComponentFiles | None:
        try:
            self._read()
        except ModelLoadFailed as error:
            place = place_of(self.path, asked.name)
            index = self.finder.recalled(place, error)
            if index is None:
                raise
            return replace(asked, checkpoint=index, weights_place=place)
        return None


def _require_config(asked: ComponentFiles, file: Path) -> None:
    if not (asked.directory / "config.json").is_file():
        raise refuse(
            asked.directory,
            f"has no config.json, which component {asked.name!r} needs beside {file}",
            "download the configuration again, or put the component's config.json there",
            kind="no_config",
            component=asked.name,
        )


def _single_file(source: str) -> Path | None:
    path = Path(source)
    is_one = path.is_absolute() and path.suffix in _SUFFIXES and not path.is_dir()
    return path if is_one else None
