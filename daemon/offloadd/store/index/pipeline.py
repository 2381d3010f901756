"""A whole diffusers pipeline on disk, weighed without loading: components, weight files, bytes.

Needs no torch, so that a source is refused before a worker spends a second on it. What it returns
has had every weight file's header checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_protocol.errors import ModelLoadFailed
from offloadd.store.index.checkpoint import (
    CheckpointIndex,
    list_directory,
    read_checkpoint,
)
from offloadd.store.index.content import HEAD_BYTES, recognise
from offloadd.store.index.naming import choose_weights
from offloadd.store.index.strict_json import parse_object
from offloadd.store.index.weight_file import looking_at, read_small_file, refuse

MODEL_INDEX_NAME = "model_index.json"
_INDEX_LIMIT_BYTES = 10_000_000
_WEIGHTLESS = ("Tokenizer", "TokenizerFast", "Scheduler", "Processor", "Extractor")


Recall = Callable[[Path, str | None], CheckpointIndex | None]
"""What is known of the weights of a place and variant that are in memory, if any are."""

GONE = ("missing", "missing_shards", "no_weights", "no_index", "dangling_link")
"""Problems that a weight file has which is not there, rather than wrong."""

_log = logging.getLogger(__name__)


Unpickle = Callable[[Path, str | None], CheckpointIndex | None]
"""Rewrites the pickles of a place and variant, and gives what it has made of them."""


def nothing_recalled(place: Path, variant: str | None) -> None:
    """The `Recall` of who keeps nothing in memory."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where weights may be had that are not in safetensors files of the model."""

    recall: Recall
    unpickle: Unpickle
    given: Given

    def find(
        self, directory: Path, variant: str | None, error: ModelLoadFailed
    ) -> CheckpointIndex | None:
        """What stands for files that could not be read for the reason that `error` gives."""
        kind = error.details.get("kind")
        if kind == "pickle":
            return self.unpickle(directory, variant)
        if kind not in GONE:
            return None
        found = self.recall(directory, variant)
        if found is None and variant is not None:
            found = self.recall(directory, None)
        if found is not None:
            _log.warning("%s; its weights are still in memory and are used", error.message)
        return found


@dataclass(frozen=True, slots=True)
class ComponentFiles:
    """One component; `checkpoint` is None for what has no weights (tokenizers, schedulers).

    `directory` holds its configuration; `weights_place` is by what its weights are recalled, where
    they are not that directory's.
    """

    name: str
    library: str
    class_name: str
    directory: Path
    checkpoint: CheckpointIndex | None
    weights_place: Path | None = None

    @property
    def origin(self) -> Path:
        """By what its weights are recalled."""
        return self.weights_place or self.directory

    @property
    def size_bytes(self) -> int:
        return self.checkpoint.size_bytes if self.checkpoint else 0


@dataclass(frozen=True, slots=True)
class PipelineFiles:
    """A pipeline's directory; components in the order of model_index.json.

    `left_out` are the components that model_index.json lists and this model goes without.
    """

    directory: Path
    class_name: str
    components: tuple[ComponentFiles, ...]
    left_out: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(component.size_bytes for component in self.components)


Given = Callable[[ComponentFiles], ComponentFiles | None]
"""Gives a component's weights where they are not in its directory; asked without a checkpoint."""


def nothing_given(asked: ComponentFiles) -> None:
    """The `Given` of a pipeline whose weights are all in its own directory."""


def inspect_pipeline(
    directory: Path,
    *,
    variant: str | None = None,
    recall: Recall = nothing_recalled,
    unpickle: Unpickle = nothing_recalled,
    given: Given = nothing_given,
    without: Collection[str] = (),
) -> PipelineFiles:
    """Read model_index.json and every component's headers.

    A component without the variant is taken in its plain form, as diffusers does. Where weight
    files are gone, what `recall` knows of their weights in memory stands for them; where there are
    only pickles, what `unpickle` makes of them. `given` goes before all of these; components in
    `without` are left out. Raises
    `ModelLoadFailed` when the directory is no pipeline, a component or a weight file is missing
    or unsound, or no component at all has the variant;
    `StorageFailed` where the disk fails.
    """
    with looking_at(directory):
        return _inspect(directory, variant, Elsewhere(recall, unpickle, given), without)


def _inspect(
    directory: Path, variant: str | None, elsewhere: Elsewhere, without: Collection[str]
) -> PipelineFiles:
    path = directory / MODEL_INDEX_NAME
    if not directory.is_dir():
        raise refuse(
            directory,
            "is not a directory",
            "give the directory of a diffusers pipeline, or the path of a *.safetensors file",
        )
    if not path.exists() and not path.is_symlink():
        raise refuse(
            directory,
            f"is not a diffusers pipeline: it has no {MODEL_INDEX_NAME}",
            "give the directory that save_pretrained of a pipeline wrote",
            kind="not_a_pipeline",
            expected=MODEL_INDEX_NAME,
            found=list_directory(directory)[:20],
        )
    index = _read_index(path)
    listed = {
        name: value
        for name, value in index.items()
        if not name.startswith("_") and is_component(value)
    }
    components = tuple(
        _component(path, name, value, variant, elsewhere)
        for name, value in listed.items()
        if name not in without
    )
    if variant is not None and not any(
        component.checkpoint and component.checkpoint.variant for component in components
    ):
        raise refuse(
            directory,
            f"has no component with the variant {variant!r}",
            "leave the variant out, or download the files of that variant",
            kind="missing_variant",
            expected=variant,
        )
    left_out = tuple(name for name in listed if name in without)
    return PipelineFiles(directory, _class_name(path, index), components, left_out)


def _read_index(path: Path) -> dict[str, Any]:
    text = read_small_file(path, _INDEX_LIMIT_BYTES)
    imposter = recognise(text[:HEAD_BYTES], len(text))
    if imposter is not None:
        raise refuse(path, imposter.problem, imposter.hint, kind=imposter.kind, found=len(text))
    try:
        return parse_object(text)
    except ValueError as error:
        raise refuse(
            path, f"is no sound pipeline index: {error}", "download it again", kind="bad_index"
        ) from None


def _class_name(path: Path, index: dict[str, Any]) -> str:
    name = index.get("_class_name")
    # A pipeline of a community repository is written [module, class].
    if isinstance(name, list) and len(name) == 2:
        name = name[1]
    if not isinstance(name, str) or not name:
        raise refuse(path, "names no pipeline class (_class_name)", "download it again")
    return name


def is_component(value: Any) -> bool:
    """Whether an entry of model_index.json is a component that is there."""
    # Settings of the pipeline (booleans, numbers) stand beside the components, and a component
    # that was left out is [null, null].
    return (
        isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) for one in value)
    )


def _component(
    index_path: Path, name: str, value: list[str], variant: str | None, elsewhere: Elsewhere
) -> ComponentFiles:
    library, class_name = value
    if not name.isidentifier():
        raise refuse(
            index_path,
            f"names a component {name!r}, which is not a plain name",
            "use a pipeline whose components are folders of its own directory",
            kind="unsafe_reference",
            found=name,
        )
    directory = index_path.parent / name
    given = elsewhere.given(ComponentFiles(name, library, class_name, directory, None))
    if given is not None:
        return given
    if not directory.is_dir():
        raise refuse(
            directory,
            f"is not there, although {MODEL_INDEX_NAME} lists {name!r} ({class_name})",
            "the download did not finish; repeat it",
            kind="missing_component",
            expected=name,
        )
    checkpoint = _weights(directory, class_name, variant, elsewhere)
    return ComponentFiles(name, library, class_name, directory, checkpoint)


def _weights(
    directory: Path, class_name: str, variant: str | None, elsewhere: Elsewhere
) -> CheckpointIndex | None:
    if class_name.endswith(_WEIGHTLESS):
        return None
    names = list_directory(directory)
    # Every module of diffusers and transformers is saved with config.json beside its weights.
    if choose_weights(names, variant) is None and "config.json" not in names:
        return None
    try:
        return read_checkpoint(directory, variant=variant)
    except ModelLoadFailed as error:
        found = elsewhere.find(directory, variant, error)
        if found is None:
            raise
        return found
