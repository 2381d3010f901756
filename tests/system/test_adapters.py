"""Adapters from the configuration to the picture: clients at once, each with its own or none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hosting.tiny_adapter_files import ATTENTION, CONVOLUTIONS, plain_with, save_adapter, sd_adapter
from hosting.tiny_pipelines import save_sd
from system.daemons import running_daemon

from offload_client import Client
from offload_protocol.errors import InvalidRequest, ModelLoadFailed

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SEED = 5
CALL: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 40, "output_type": "np"}
WORN: list[dict[str, float]] = [{"ink": 0.8}, {}, {"oil": 1.5}, {"oil": 0.4, "ink": 1.0}]

CONFIG = """
[[models]]
name = "tiny"
source = "{model}"
components.unet = {{ mode = "group", offload_to_disk_path = "{packs}" }}

[[models.adapters]]
name = "ink"
source = "{ink}"

[[models.adapters]]
name = "oil"
source = "{oil}"

[[models.adapters]]
name = "late"
source = "{late}"
"""


def test_clients_at_once_get_their_own_adapters_and_never_another_ones(tmp_path: Path) -> None:
    model = save_sd(tmp_path / "model")
    ink = sd_adapter(model, 1, ATTENTION, encoder=True)
    oil = sd_adapter(model, 7, CONVOLUTIONS, encoder=False)
    files = {
        "ink": save_adapter(tmp_path / "ink.safetensors", ink),
        "oil": save_adapter(tmp_path / "oil.safetensors", oil),
    }
    late = save_adapter(tmp_path / "late.safetensors", ink)
    config = CONFIG.format(model=model, late=late, packs=tmp_path / "packs", **files)
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    expected = [plain_with(model, files, worn, SEED, num_inference_steps=40) for worn in WORN]
    assert not np.array_equal(expected[0], expected[1])

    with running_daemon(tmp_path / "d", config=config, environment=environment) as daemon:

        def draw_often(number: int) -> list[Any]:
            chosen = [{"name": name, "weight": one} for name, one in WORN[number].items()]
            with daemon.client(program=f"program {number}") as client:
                call = {**CALL, "prompt": "a cat on a mat"}
                return [
                    client.generate("tiny", seed=SEED, adapters=chosen, **call).outputs["images"]
                    for _ in range(2)
                ]

        with ThreadPoolExecutor(len(WORN)) as clients:
            for number, drawn in enumerate(clients.map(draw_often, range(len(WORN)))):
                for images in drawn:
                    np.testing.assert_array_equal(images, expected[number])
        with Client(daemon.endpoint) as client:
            with pytest.raises(InvalidRequest, match=r"no adapter 'inc' .*did you mean 'ink'"):
                client.generate("tiny", "a cat", adapters=[{"name": "inc"}], **CALL)
            late.write_bytes(late.read_bytes()[:-100])
            with pytest.raises(ModelLoadFailed, match=r"'late'.*cut short"):
                client.generate("tiny", "a cat", adapters=[{"name": "late"}], **CALL)
            images = client.generate("tiny", "a cat on a mat", seed=SEED, **CALL).outputs["images"]
            np.testing.assert_array_equal(images, expected[1])
