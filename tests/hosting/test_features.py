"""Features reach the components that have them, and are refused where none has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hosting.hosting_help import Drawn, draw, host
from hosting.test_storage_dtype import cast_script

from offload_protocol.errors import InvalidRequest
from offloadd.channel.checked_specs import model_spec
from offloadd.hosting.loading.loading import modules


def test_a_feature_of_the_whole_model_goes_to_the_components_that_have_it(
    sd_directory: Path, references: dict[Path, Drawn]
) -> None:
    model = host(sd_directory, offload={"mode": "none", "slicing": True, "channels_last": True})
    assert modules(model._pipeline)["vae"].use_slicing
    np.testing.assert_allclose(draw(model), references[sd_directory], atol=1e-4)
    assert model.unload() == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"offload": {"mode": "none", "attention_backend": "native"}}, "takes no backend"),
        ({"components": {"vae": {"attention_backend": "nonsense"}}}, "takes no backend"),
        ({"components": {"unet": {"mode": "none", "tiling": True}}}, "UNet2DConditionModel"),
        ({"components": {"text_encoder": {"channels_last": True}}}, "four dimensions"),
        ({"components": {"vae": {"compile": "regional"}}}, "no blocks that repeat"),
    ],
)
def test_a_feature_that_no_asked_component_has_is_refused_with_the_reason(
    sd_directory: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named) as refused:
        host(sd_directory, **options)
    assert refused.value.details["component"]


@pytest.mark.parametrize("backend", ["sage_hub", "nonsense"])
def test_an_attention_backend_that_cannot_be_used_is_refused(
    flux_directory: Path, backend: str
) -> None:
    offload = {"mode": "none", "attention_backend": backend}
    with pytest.raises(InvalidRequest, match=backend):
        host(flux_directory, components={"transformer": offload})


def test_what_is_left_out_of_8_bits_needs_8_bits() -> None:
    with pytest.raises(InvalidRequest, match="storage_dtype"):
        model_spec("tiny", "/model", {"offload": {"mode": "none", "storage_skip": ["norm"]}})


def test_auto_keeps_the_other_settings_of_a_component(sd_directory: Path) -> None:
    model = host(sd_directory, components={"unet": {"storage_dtype": "float8_e4m3fn"}})
    np.testing.assert_array_equal(draw(model), cast_script(sd_directory, torch.float8_e4m3fn))
    assert model.unload() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_blocks_give_nearly_the_plain_picture_also_where_weights_come_and_go(
    flux_directory: Path, references: dict[Path, Drawn], tmp_path: Path
) -> None:
    streamed = {"mode": "group", "offload_to_disk_path": str(tmp_path)}
    for offload in ({"mode": "none"}, streamed):
        model = host(flux_directory, components={"transformer": {**offload, "compile": "regional"}})
        for _ in range(2):
            # Fused operations round at other places.
            np.testing.assert_allclose(draw(model), references[flux_directory], atol=1e-4)
        assert (model.moved_bytes > 0) == (offload == streamed)
        assert model.unload() == []
