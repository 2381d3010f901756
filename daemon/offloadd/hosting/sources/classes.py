"""From the class names in a model's files to classes of diffusers and transformers, and no others.

A name from a file is only ever looked up among what these two packages export: no module is
imported because a file names it, and no code that lies beside weights runs.
"""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import transformers
from diffusers import DiffusionPipeline, pipelines

from offload_protocol.errors import ModelLoadFailed

_PACKAGES = ("diffusers", "transformers")


def pipeline_class(name: str) -> type[Any]:
    """The diffusers pipeline class of that name; raises `ModelLoadFailed` for any other."""
    found = _exported(diffusers, name)
    if found is None or not issubclass(found, DiffusionPipeline) or found is DiffusionPipeline:
        raise ModelLoadFailed(
            f"{name[:100]!r} is not a pipeline of diffusers {diffusers.__version__}",
            hint="custom pipelines are not hosted, because they bring code of their own; "
            "a newer diffusers may know the name",
            details={"kind": "unknown_pipeline", "found": name[:100]},
        )
    return found


def component_class(component: str, library: str, name: str) -> type[Any]:
    """The class of a component that `model_index.json` writes as `[library, name]`.

    `library` is diffusers, transformers, or the name of a folder of diffusers' pipelines. Raises
    `ModelLoadFailed` for everything else.
    """
    packages = {"diffusers": diffusers, "transformers": transformers}
    package = packages.get(library) or _pipeline_package(library)
    found = _exported(package, name) if package is not None else None
    if found is None or not hasattr(found, "from_pretrained"):
        raise ModelLoadFailed(
            f"component {component!r} is a {library[:100]}.{name[:100]}, which neither diffusers "
            f"{diffusers.__version__} nor transformers {transformers.__version__} has",
            hint="components with code of their own are not hosted; newer libraries may know it",
            details={"kind": "unknown_class", "component": component, "found": name[:100]},
        )
    return found


def _pipeline_package(library: str) -> Any:
    return getattr(pipelines, library, None) if library.isidentifier() else None


def _exported(package: Any, name: str) -> type[Any] | None:
    if not name.isidentifier() or name.startswith("_"):
        return None
    found = getattr(package, name, None)
    home = getattr(found, "__module__", "").partition(".")[0]
    return found if inspect.isclass(found) and home in _PACKAGES else None
