"""The running picture on request: it comes, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image, ImageChops
from system.daemons import Daemon

from offload_client import Progress
from offload_protocol.errors import InvalidRequest

pytestmark = pytest.mark.system

PROMPT = "a red circle on a white background"


def test_a_job_shows_its_picture_while_it_runs_and_draws_the_same(daemon: Daemon) -> None:
    events: list[Progress] = []
    options: dict[str, Any] = {"seed": 7, "num_inference_steps": 60}
    with daemon.client() as client:
        shown = client.generate(
            "shapes", PROMPT, preview_every_s=0.1, on_progress=events.append, **options
        )
        assert any(event.preview is not None for event in events)
        for event in events:
            if event.preview is not None:
                assert isinstance(event.preview, Image.Image)
                assert event.preview.mode == "L"
                assert event.state == "running"
        events.clear()
        plain = client.generate("shapes", PROMPT, on_progress=events.append, **options)
        assert not any(event.preview for event in events)
    assert ImageChops.difference(shown.image, plain.image).getbbox() is None


@pytest.mark.parametrize("every_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_preview_needs_a_time(daemon: Daemon, every_s: float) -> None:
    with daemon.client() as client, pytest.raises(InvalidRequest, match="preview_every_s"):
        client.generate("shapes", PROMPT, preview_every_s=every_s)
