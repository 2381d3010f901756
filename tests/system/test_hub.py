"""A model named as on the hub is downloaded into the cache while others draw, and then draws."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hosting.hosting_help import CALL, SEED, plain_script
from hosting.hub_server import running_hub
from hosting.tiny_pipelines import save_sd
from system.daemons import running_daemon

from offload_protocol.errors import ModelLoadFailed

pytestmark = pytest.mark.system

NAME = "some-one/tiny.sd"


def test_a_model_is_downloaded_beside_the_turns_of_others(tmp_path: Path, short_tmp: Path) -> None:
    model = save_sd(tmp_path / "model")
    near = save_sd(tmp_path / "near", seed=50)
    with running_hub({NAME: model}) as hub:
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }
        hub.gate.clear()
        with (
            running_daemon(short_tmp / "hub", environment=environment) as daemon,
            daemon.client() as client,
        ):
            with pytest.raises(ModelLoadFailed, match="is not on the hub") as refused:
                client.load("stranger", "some-one/other")
            assert refused.value.hint
            with pytest.raises(ModelLoadFailed, match="is not on the hub") as paused:
                client.generate("stranger", "a cat")
            assert 0 < paused.value.details["retry_after_s"] <= 10
            ended = threading.Event()

            def load() -> None:
                with daemon.client() as other:
                    other.load("far", NAME)
                    ended.set()

            loading = threading.Thread(target=load)
            loading.start()
            assert hub.reached_gate.wait(60)
            # It is in the middle of a file, and whoever has their model goes on.
            client.load("near", near)
            client.generate(
                "near", CALL["prompt"], seed=SEED, height=16, width=16, num_inference_steps=2
            )
            far = {one.name: one for one in client.models()}["far"]
            assert far.state == "downloading"
            assert far.download is not None
            assert 0 < far.download.done_bytes < far.download.total_bytes
            assert not ended.is_set()
            hub.gate.set()
            loading.join(60)
            assert ended.is_set()
            drawn = client.generate("far", seed=SEED, **CALL)
        np.testing.assert_array_equal(drawn.outputs["images"], plain_script(model))
