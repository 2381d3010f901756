"""Which pipeline class does a task with a model's weights, so that tasks cost no second copy.

diffusers names the classes that share weights alike: `FluxPipeline`, `FluxImg2ImgPipeline`,
`FluxInpaintPipeline`. Its own table of them is not asked, because it imports every pipeline there
is.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, get_args

import diffusers

from offload_protocol.errors import ModelLoadFailed
from offloadd.channel.specs import Task
from offloadd.hosting.sources.classes import pipeline_class

_END = "Pipeline"
_INFIXES: dict[Task, str] = {
    "image-to-image": "Img2Img",
    "inpainting": "Inpaint",
    "image-to-video": "ImageToVideo",
    "video-to-video": "VideoToVideo",
}
_FROM_TEXT: dict[Task, tuple[Task, ...]] = {
    "text-to-image": ("image-to-image", "inpainting"),
    "text-to-video": ("image-to-video", "video-to-video"),
}


def class_for_task(saved_as: str, task: Task) -> str:
    """The name of the pipeline class that does `task` with the weights of a `saved_as`.

    Raises `ModelLoadFailed` with the tasks that there are.
    """
    found = _classes(saved_as)
    if task not in found:
        known = ", ".join(one for one in get_args(Task) if one in found) or "no others"
        raise ModelLoadFailed(
            f"diffusers has no pipeline for the task {task!r} on the weights of a {saved_as}",
            hint=f"its tasks are: {known}; `pipeline` names a class of diffusers directly",
            details={"kind": "no_task", "pipeline": saved_as, "task": task},
        )
    return found[task]


def check_components(class_name: str, there: Collection[str]) -> None:
    """Raise `ModelLoadFailed` if a pipeline class needs a component that the model lacks."""
    kind: Any = pipeline_class(class_name)
    optional = set(kind._optional_components)
    missing = [
        name
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if name != "self" and parameter.default is parameter.empty and name not in optional
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if name not in there
    ]
    if missing:
        raise ModelLoadFailed(
            f"a {class_name} needs {', '.join(missing)}, which this model does not have",
            hint="take a model that was saved for this task",
            details={"kind": "missing_component", "pipeline": class_name, "missing": missing},
        )


def _classes(saved_as: str) -> dict[Task, str]:
    family = saved_as.removesuffix(_END)
    for infix in _INFIXES.values():
        family = family.removesuffix(infix)
    siblings: dict[Task, str] = {
        task: name
        for task, infix in _INFIXES.items()
        if hasattr(diffusers, name := f"{family}{infix}{_END}")
    }
    plain = f"{family}{_END}"
    from_text = {
        task: plain
        for task, others in _FROM_TEXT.items()
        if hasattr(diffusers, plain) and any(other in siblings for other in others)
    }
    return {**from_text, **siblings}
