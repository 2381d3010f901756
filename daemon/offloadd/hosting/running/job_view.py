"""One job's view of a pipeline: the same weights, but its own state and progress.

Schedulers count their steps and pipelines keep settings of the call on themselves; a job works on
copies of both, so that neither a job before it nor one that was broken off shows in its picture.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from diffusers import DiffusionPipeline

OnStep = Callable[[int, int], None]
"""Told the steps done and their number (0 while unknown); may raise to stop the job."""


def job_view(pipeline: Any, device: torch.device, on_step: OnStep) -> Any:
    """A shallow copy of the pipeline with schedulers of its own, reporting to `on_step`.

    Its execution device is `device`, whatever the hooks of offloaded components suggest.
    """
    kind = type(pipeline)
    members = {
        "__module__": kind.__module__,
        "_execution_device": property(lambda _: device),
        "progress_bar": lambda _, iterable=None, total=None: StepBar(on_step, iterable, total),
    }
    view = copy.copy(pipeline)
    view.__class__ = type(kind.__name__, (kind,), members)
    for name, component in pipeline.components.items():
        # Not setattr: the pipeline would write the class of the component into its configuration.
        if hasattr(component, "set_timesteps"):
            view.__dict__[name] = copy.deepcopy(component)
    for name, inner in pipeline.__dict__.items():
        # Combined pipelines call pipelines of their own.
        if isinstance(inner, DiffusionPipeline):
            view.__dict__[name] = job_view(inner, device, on_step)
    return view


class StepBar:
    """Stands where a pipeline expects tqdm; counts its steps."""

    def __init__(self, on_step: OnStep, iterable: Iterable[Any] | None, total: int | None) -> None:
        self._on_step = on_step
        self._iterable = iterable
        self.total = total if total is not None else _length(iterable)
        self.n = 0
        self._tell()

    def update(self, n: int = 1) -> None:
        self.n += int(n)
        self._tell()

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable or ():
            yield item
            self.update()

    def __len__(self) -> int:
        return self.total

    def __enter__(self) -> StepBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    set_description = set_postfix = set_postfix_str = set_description_str = refresh = write = (
        _ignore
    )

    def _tell(self) -> None:
        self._on_step(self.n, self.total)


def _length(iterable: Any) -> int:
    return len(iterable) if hasattr(iterable, "__len__") else 0
