"""Classes that only choose another one: the class that their `from_pretrained` would build.

Promises: what is chosen is the choice of the library itself, by the component's configuration, and
a class that these packages export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import transformers
from diffusers import AutoModel, ModelMixin
from diffusers.models.model_loading_utils import _fetch_remapped_cls_from_config
from diffusers.models.modeling_utils import LegacyModelMixin
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _get_model_class

from offloadd.hosting.sources.classes import component_class


def class_to_build(component: str, kind: type[Any], directory: Path) -> type[Any]:
    """The class itself, or the one that it stands for with the configuration in a directory.

    Raises `ModelLoadFailed` where that is no class of diffusers or transformers, and what the
    libraries raise for a configuration that does not fit.
    """
    if kind is AutoModel:
        config = AutoModel.load_config(directory, local_files_only=True)
        if "model_type" in config:
            return class_to_build(component, transformers.AutoModel, directory)
        return component_class(component, diffusers.__name__, str(config.get("_class_name")))
    if issubclass(kind, LegacyModelMixin):
        config = kind.load_config(directory, local_files_only=True)
        chosen: type[Any] = _fetch_remapped_cls_from_config(config, kind)
        return chosen
    if issubclass(kind, _BaseAutoModelClass):
        settings = AutoConfig.from_pretrained(directory, local_files_only=True)
        found = _get_model_class(settings, kind._model_mapping)
        return component_class(component, transformers.__name__, found.__name__)
    return kind


def loads_in_its_own_way(kind: type[Any]) -> bool:
    """Whether a class has a `from_pretrained` that may do more than that of its library."""
    if issubclass(kind, LegacyModelMixin):
        # It chooses a class, and reads this one like any other.
        return kind.from_pretrained.__func__ is not LegacyModelMixin.from_pretrained.__func__
    base = ModelMixin if issubclass(kind, ModelMixin) else PreTrainedModel
    return kind.from_pretrained.__func__ is not base.from_pretrained.__func__
