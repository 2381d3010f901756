"""What a call takes is read from its annotations, and code is never among it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch

from offloadd.hosting.sources.signatures import Parameter, call_parameters


class Pipeline:
    def __call__(  # type: ignore[no-untyped-def]
        self,
        prompt: str,
        steps: int = 50,
        scale: float = 7.5,
        size: tuple[int, int] | None = None,
        image: PIL.Image.Image | np.ndarray[Any, Any] | list[PIL.Image.Image] | None = None,
        latents: Optional[torch.FloatTensor] = None,  # noqa: UP045
        embeds: Union[torch.Tensor, list[torch.Tensor], None] = None,  # noqa: UP007
        options: dict[str, Any] | None = None,
        kind: Literal["a", "b"] = "a",
        anything: Any = None,
        unannotated=None,
        sigma_or_function: float | Callable[[int], float] = 1.0,
        flag: bool = False,
        generator: torch.Generator | None = None,
        on_step: Callable[[int], None] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        return_dict: bool = True,
        **extra: Any,
    ) -> None: ...


@pytest.fixture
def parameters() -> dict[str, Parameter]:
    return call_parameters(Pipeline)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("prompt", ("str",)),
        ("steps", ("int",)),
        ("scale", ("float", "int")),
        ("size", ("list", "none")),
        ("image", ("image", "array", "list", "none")),
        ("latents", ("array", "none")),
        ("embeds", ("array", "list", "none")),
        ("options", ("map", "none")),
        ("kind", ("str",)),
        ("anything", ()),
        ("unannotated", ()),
        ("sigma_or_function", ("float", "int")),
        ("flag", ("bool",)),
    ],
)
def test_kinds_follow_the_annotation(
    parameters: dict[str, Parameter], name: str, kinds: tuple[str, ...]
) -> None:
    assert parameters[name].kinds == kinds


@pytest.mark.parametrize(
    ("annotation", "items"),
    [
        (str | list[str], ("str",)),
        (list[float] | None, ("float", "int")),
        (tuple[int, int], ("int",)),
        (tuple[int, ...], ("int",)),
        (list[str | None], ("str", "none")),
        (list, ()),
        (list[str] | list, ()),
        (list[list[int]], ()),
        (list[PIL.Image.Image], ()),
        (list[Any], ()),
        (str, ()),
    ],
)
def test_items_of_lists_have_kinds_where_they_are_plain(
    annotation: Any, items: tuple[str, ...]
) -> None:
    class Listing:
        def __call__(self, value: Any = None) -> None: ...

    Listing.__call__.__annotations__["value"] = annotation
    assert call_parameters(Listing)["value"].items == items


def test_only_what_has_no_default_is_required(parameters: dict[str, Parameter]) -> None:
    assert [one.name for one in parameters.values() if one.required] == ["prompt"]


def test_code_noise_and_wrapping_are_no_parameters(parameters: dict[str, Parameter]) -> None:
    hidden = {"self", "generator", "on_step", "return_dict", "extra"}
    assert not hidden & parameters.keys()
    assert "callback_on_step_end_tensor_inputs" not in parameters


def test_tensors_are_wanted_only_where_arrays_would_not_do(
    parameters: dict[str, Parameter],
) -> None:
    wanting = {one.name for one in parameters.values() if one.wants_tensor}
    assert wanting == {"latents", "embeds"}
    assert [one.name for one in parameters.values() if one.wants_tuple] == ["size"]


# Some of them use what torch has deprecated since.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_pipeline_of_diffusers_can_be_read() -> None:
    found = 0
    for name in dir(diffusers):
        kind = getattr(diffusers, name) if name.endswith("Pipeline") else None
        if not isinstance(kind, type) or not issubclass(kind, diffusers.DiffusionPipeline):
            continue
        found += 1
        for parameter in call_parameters(kind).values():
            assert "callback" not in parameter.name, (name, parameter)
            assert parameter.name != "generator", name
    assert found > 100
