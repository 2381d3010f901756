"""Which pipelines put other attention processors into their modules while they are called."""

from __future__ import annotations

import diffusers
import pytest

from offloadd.hosting.running.call_effects import exchanges_processors


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("StableDiffusionPipeline", False),
        ("StableDiffusionXLPipeline", False),
        ("FluxPipeline", False),
        ("StableDiffusionPAGPipeline", True),
        ("StableDiffusion3PAGPipeline", True),
        ("StableDiffusionSAGPipeline", True),
    ],
)
def test_a_call_that_exchanges_processors_is_known_by_its_code(kind: str, expected: bool) -> None:
    """All of them can exchange some by other methods, as for image prompts, but not by a call."""
    assert exchanges_processors(getattr(diffusers, kind)) is expected
