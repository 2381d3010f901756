"""What a worker is told to host: a model's source and how its weights are to be offloaded.

`checked_specs` makes these of what people write.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

OffloadMode = Literal["auto", "none", "stream", "model", "sequential", "group"]
Task = Literal[
    "text-to-image",
    "image-to-image",
    "inpainting",
    "text-to-video",
    "image-to-video",
    "video-to-video",
]


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What weights are quantised to when a model is loaded, and which are left alone."""

    type: Literal["int8", "float8"]
    skip: list[str] = []
    """Parts of module paths, as the library's `modules_to_not_convert`."""


class OffloadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one component, or a whole pipeline, is offloaded.

    The parameters below `mode` belong to `group` and are named as in
    `diffusers.hooks.apply_group_offloading`; those in `NOTHING_TO_CHOOSE` are taken and change
    nothing. What rests in `offload_to_disk_path` is a pack, and only where the model's own files
    cannot be read as they are.
    """

    mode: OffloadMode = "auto"
    storage_dtype: Literal["float8_e4m3fn", "float8_e5m2"] | None = None
    """What large layers are stored and moved in; they are cast back for each use."""
    storage_skip: list[str] | None = None
    """Regular expressions searched for in module paths: what `storage_dtype` leaves alone."""
    quantization: QuantizationSpec | None = None
    """What linear layers are quantised to when it is loaded; they compute with it as it is."""
    tiling: bool = False
    """An autoencoder decodes in overlapping tiles."""
    slicing: bool = False
    """An autoencoder decodes one picture of a batch at a time."""
    channels_last: bool = False
    """Weights of four dimensions lie channels last."""
    attention_backend: str | None = None
    """What computes attention, by its name in diffusers."""
    compile: Literal["regional"] | None = None
    """Whether blocks that repeat are compiled by torch."""
    offload_type: Literal["block_level", "leaf_level"] | None = None
    num_blocks_per_group: int | None = None
    non_blocking: bool | None = None
    use_stream: bool | None = None
    record_stream: bool | None = None
    low_cpu_mem_usage: bool | None = None
    offload_to_disk_path: str | None = None
    block_modules: list[str] | None = None
    exclude_kwargs: list[str] | None = None

    def group_parameters(self) -> dict[str, Any]:
        """The parameters of `group` that were set, by their names in diffusers."""
        return {
            name: value
            for name in self.__struct_fields__
            if name in GROUP_PARAMETERS and (value := getattr(self, name)) is not None
        }


class ComponentSpec(OffloadSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One component: how it is offloaded, and where its weights are if not in the model's source.

    `source` is a safetensors file, in the layout of diffusers or of the model's authors, or the
    directory of a component.
    """

    source: str | None = None

    @property
    def is_only_a_source(self) -> bool:
        """Whether it leaves everything but its source to the model's settings."""
        return self.source is not None and self == ComponentSpec(source=self.source)


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter that requests may name: a safetensors file of LoRA matrices, or its directory."""

    name: str
    source: str


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hosted model.

    `source` is a directory with `model_index.json`, the name of one in the hub cache, a single-file
    checkpoint, or `builtin:shapes`.
    """

    name: str
    source: str
    config: str | None = None
    """The directory of configurations that goes with a single-file checkpoint, as a source."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    variant: str | None = None
    revision: str | None = None
    """The branch, tag or commit of a model in the hub cache; None: main."""
    task: Task | None = None
    """What it is for, if not what it was saved for; the weights are the same."""
    pipeline: str | None = None
    """The class of diffusers that draws, in place of the one that it was saved as."""
    offload: OffloadSpec = OffloadSpec()
    components: dict[str, ComponentSpec] = {}
    """Settings for single components, by name; the others follow `offload`."""
    device_budget: str | None = None
    """What its weights may take of the device at once: a size, or a share such as `50%`."""
    adapters: list[AdapterSpec] = []
    """What a request's `adapters` may name; each is loaded when first asked for."""
    weights_only: bool = False
    """Whether weights that are only there as pickles are taken, as torch's `weights_only` does."""
    reuse_embeddings: bool = True
    """Whether its text encoders may answer from what they gave before (`hosting.embeddings`)."""
    preload: bool = False
    keep_alive: float | None = None
    """Seconds that it stays in memory unused; below 0 for ever; None: as the daemon has it."""

    @property
    def own_offloads(self) -> dict[str, OffloadSpec]:
        """The components that do not follow `offload`, with their settings."""
        return {name: one for name, one in self.components.items() if not one.is_only_a_source}

    @property
    def names_files(self) -> bool:
        """Whether it names any place on this machine, or a model in the hub cache."""
        places = [self.config, self.offload.offload_to_disk_path]
        for one in self.components.values():
            places += [one.source, one.offload_to_disk_path]
        return not self.source.startswith("builtin:") or bool(self.adapters) or any(places)


FEATURES = ("tiling", "slicing", "channels_last", "attention_backend", "compile")
"""The settings of `OffloadSpec` that change how a module computes."""

GROUP_PARAMETERS = (
    "offload_type",
    "num_blocks_per_group",
    "non_blocking",
    "use_stream",
    "record_stream",
    "low_cpu_mem_usage",
    "offload_to_disk_path",
    "block_modules",
    "exclude_kwargs",
)
"""The settings of `OffloadSpec` that belong to `group`."""

NOTHING_TO_CHOOSE = frozenset(
    {"non_blocking", "use_stream", "record_stream", "low_cpu_mem_usage", "exclude_kwargs"}
)
"""Parameters of `group` that leave the offload engine nothing to choose.

It always copies beside the computation, from memory that is page-locked in place, ordered by
events, and never touches a module's arguments.
"""
