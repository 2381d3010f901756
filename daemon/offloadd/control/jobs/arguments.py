"""Whether a job's arguments can be passed to the hosted pipeline: judged before they are queued.

Pure: from the parameters that the worker described to the first thing that is wrong, in a sentence
that names the argument, what was given and what would do.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload_protocol.errors import InvalidRequest, TooLarge
from offloadd.channel.messages import ModelDescribed, ParameterInfo


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one job may ask for."""

    max_steps: int
    max_pixels: int
    max_images: int
    max_frames: int


def check_arguments(
    arguments: Mapping[str, Any], described: ModelDescribed, bounds: Bounds
) -> None:
    """Raise `InvalidRequest` or `TooLarge` for arguments that this model cannot or may not take."""
    parameters = {parameter.name: parameter for parameter in described.parameters}
    for name, value in arguments.items():
        if name not in parameters:
            raise _unknown(name, described.pipeline, list(parameters))
        _check_kind(value, parameters[name])
        _check_finite(value, name)
    for name, parameter in parameters.items():
        if parameter.required and name not in arguments:
            raise InvalidRequest(
                f"the argument {name!r} is missing",
                hint=f"{described.pipeline or 'the model'} cannot run without it",
            )
    _check_steps(arguments, bounds)
    _check_size(arguments, described.size_multiple, bounds)
    _check_count(arguments, bounds)


def kind_of(value: Any) -> str:
    """The kind of a plain value, by the words of `ParameterInfo.kinds`."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "array" if "$array" in value else "image" if "$image" in value else "map"
    for kind, word in ((bool, "bool"), (int, "int"), (float, "float"), (str, "str")):
        if isinstance(value, kind):
            return word
    return "list"


def _unknown(name: str, pipeline: str, known: Sequence[str]) -> InvalidRequest:
    model = pipeline or "the model"
    if name == "generator":
        return InvalidRequest(
            "the argument 'generator' cannot be sent", hint="give the request a seed instead"
        )
    if "callback" in name:
        return InvalidRequest(
            f"the argument {name[:80]!r} cannot be sent: no code is taken from clients",
            hint="the request's progress says how far it is",
        )
    near = difflib.get_close_matches(name, known, n=1)
    return InvalidRequest(
        f"{model} takes no argument {name[:80]!r}",
        hint=f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}",
        details={"known": list(known)},
    )


def _check_kind(value: Any, parameter: ParameterInfo) -> None:
    _check_fits(value, f"argument {parameter.name!r}", parameter.kinds)
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_fits(item, f"item {index} of the argument {parameter.name!r}", parameter.items)


def _check_fits(value: Any, what: str, kinds: Sequence[str]) -> None:
    kind = kind_of(value)
    fits = {kind, "float"} if kind == "int" else {kind}
    if kinds and fits.isdisjoint(kinds):
        raise InvalidRequest(
            f"the {what} is of kind {kind}: {_shown(value)}", hint=f"it takes {' or '.join(kinds)}"
        )


def _check_finite(value: Any, place: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"the argument {place!r} holds {value}", hint="give a finite number")
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_finite(item, f"{place}[{index}]")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, f"{place}.{key}")


def _check_steps(arguments: Mapping[str, Any], bounds: Bounds) -> None:
    for name in ("num_inference_steps", "prior_num_inference_steps", "decoder_num_inference_steps"):
        _check_between(arguments, name, 1, bounds.max_steps, "limits.max_steps")
    for name in ("timesteps", "sigmas"):
        steps = arguments.get(name)
        if isinstance(steps, list) and not 1 <= len(steps) <= bounds.max_steps:
            raise InvalidRequest(
                f"the argument {name!r} has {len(steps)} entries",
                hint=f"give 1 to {bounds.max_steps} (limits.max_steps of the daemon)",
            )


def _check_size(arguments: Mapping[str, Any], multiple: int, bounds: Bounds) -> None:
    # A side that is not given has at least the smallest size.
    sides = {"height": multiple, "width": multiple}
    for name in sides:
        value = arguments.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if value < multiple or value % multiple:
            near = max(round(value / multiple), 1) * multiple
            raise InvalidRequest(
                f"the argument {name!r} is {value}, which is not a positive multiple of {multiple}",
                hint=f"use {near}",
            )
        sides[name] = value
    pixels = sides["height"] * sides["width"]
    if pixels > bounds.max_pixels:
        raise TooLarge(
            f"a picture of {sides['width']} × {sides['height']} has {pixels} pixels, "
            f"the limit is {bounds.max_pixels}",
            hint="ask for a smaller one; limits.max_pixels of the daemon sets the limit",
        )


def _check_count(arguments: Mapping[str, Any], bounds: Bounds) -> None:
    _check_between(arguments, "num_frames", 1, bounds.max_frames, "limits.max_frames")
    for name in ("num_images_per_prompt", "num_videos_per_prompt"):
        _check_between(arguments, name, 1, bounds.max_images, "limits.max_images")
    prompts = arguments.get("prompt")
    if isinstance(prompts, list) and not prompts:
        raise InvalidRequest("the argument 'prompt' is an empty list", hint="give one text or more")
    each = arguments.get("num_images_per_prompt")
    count = (len(prompts) if isinstance(prompts, list) else 1) * (
        each if isinstance(each, int) else 1
    )
    if count > bounds.max_images:
        raise TooLarge(
            f"the request asks for {count} pictures, the limit is {bounds.max_images}",
            hint="split it; limits.max_images of the daemon sets the limit",
        )


def _check_between(
    arguments: Mapping[str, Any], name: str, low: int, high: int, limit: str
) -> None:
    value = arguments.get(name)
    if value is None:
        return
    if isinstance(value, (int, float)) and not low <= value <= high:
        raise InvalidRequest(
            f"the argument {name!r} is {_shown(value)}",
            hint=f"it takes {low} to {high} ({limit} of the daemon sets the limit)",
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
