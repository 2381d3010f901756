"""What control plane and worker have to read alike in the arguments of a pipeline's call."""

from __future__ import annotations

from collections.abc import Iterable


def may_scale_adapters(arguments: Iterable[str]) -> bool:
    """Whether a call with arguments of these names may scale adapters for its length.

    Diffusers takes the scale in `cross_attention_kwargs`, `joint_attention_kwargs` and the like.
    """
    return any(name.endswith("_kwargs") for name in arguments)
