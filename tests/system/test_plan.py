"""`offloadctl plan` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from system.daemons import Daemon

import offloadd.hosting
from offload_protocol.errors import ModelLoadFailed

pytestmark = pytest.mark.system

SHAPES = Path(offloadd.hosting.__file__).parent / "shapes"


def test_a_model_is_planned_from_its_headers_and_drawn_and_not_loaded(
    daemon: Daemon, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "offloadctl", "--endpoint", daemon.endpoint, "--json", "plan"]
    picture = tmp_path / "plan.png"
    words = [str(SHAPES), "--device-budget", "60%", "--plot", str(picture)]
    with daemon.client() as client:
        before = {one.name: one.state for one in client.models()}
        ended = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
        assert {one.name: one.state for one in client.models()} == before
        hosted = client.plan("shapes", host_budget="16GiB")
        with pytest.raises(ModelLoadFailed):
            client.plan(tmp_path)
    told = json.loads(ended.stdout)
    assert told["device_bytes"] <= told["device_budget_bytes"]
    assert [part["name"] for part in told["components"]] == [one.name for one in hosted.components]
    assert hosted.host_bytes > 0
    with Image.open(picture) as drawn:
        assert drawn.size[0] > 100


def test_a_hosted_model_is_planned_as_it_is_hosted(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.load("half", SHAPES, device_budget="60%", offload={"mode": "stream"})
        as_hosted, whole = client.plan("half"), client.plan("half", device_budget="100%", name="x")
        client.unload("half")
    assert [part.offload for part in as_hosted.components if part.bytes] == ["stream"] * 3
    assert as_hosted.device_budget_bytes is not None
    assert whole.device_budget_bytes is not None
    assert as_hosted.device_budget_bytes < whole.device_budget_bytes
