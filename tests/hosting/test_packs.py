"""Weights that cannot be used as they lie are packed once, and each pack is its own model's."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hosting.hosting_help import Drawn, device_host, draw, host, plain_script
from hosting.tiny_pipelines import save_sd
from safetensors.torch import load_file, save_file

from offload_protocol.errors import Cancelled, ModelLoadFailed, StorageFailed
from offloadd.channel.checked_specs import model_spec
from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.sources.describe import describe
from offloadd.store.pack_cache import cache_directory

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def half_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in float16, which a CPU computes in float32."""
    return save_sd(tmp_path_factory.mktemp("half"), dtype=torch.float16)


@pytest.fixture(scope="module")
def half_reference(half_directory: Path) -> Drawn:
    return plain_script(half_directory, dtype=torch.float32)


def on_disk(path: Path, level: str = "leaf_level") -> dict[str, Any]:
    return {"mode": "group", "offload_type": level, "offload_to_disk_path": str(path)}


def packed(directory: Path) -> dict[str, int]:
    return {one.name: one.stat().st_ino for one in directory.glob("*.safetensors")}


def test_a_cast_model_draws_the_picture_of_a_plain_script_and_is_packed_once(
    half_directory: Path, half_reference: Drawn, tmp_path: Path
) -> None:
    for offload in (on_disk(tmp_path), on_disk(tmp_path, "block_level")):
        model = host(half_directory, offload=offload)
        np.testing.assert_array_equal(draw(model), half_reference)
        assert model.unload() == []
        first = packed(tmp_path)
        assert len(first) == 3
    assert packed(tmp_path) == first


def test_case_13_a_model_that_changed_on_disk_gets_a_new_pack_and_the_old_one_goes(
    half_directory: Path, tmp_path: Path
) -> None:
    source, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(half_directory, source)
    assert host(source, offload=on_disk(cache)).unload() == []
    before = packed(cache)
    weights = load_file(source / UNET)
    save_file({name: one * 2 for name, one in weights.items()}, source / UNET)
    model = host(source, offload=on_disk(cache))
    np.testing.assert_array_equal(draw(model), plain_script(source, dtype=torch.float32))
    assert model.unload() == []
    assert len(packed(cache)) == 3
    assert len(packed(cache).keys() & before.keys()) == 2


def test_case_12_two_models_on_one_path_keep_their_own_weights(
    half_directory: Path, half_reference: Drawn, tmp_path: Path
) -> None:
    other_directory = save_sd(tmp_path / "other", seed=50, dtype=torch.float16)
    first = host(half_directory, offload=on_disk(tmp_path / "packs"))
    second = host(other_directory, offload=on_disk(tmp_path / "packs"))
    np.testing.assert_array_equal(draw(first), half_reference)
    expected = plain_script(other_directory, dtype=torch.float32)
    np.testing.assert_array_equal(draw(second), expected)
    assert first.unload() == []
    np.testing.assert_array_equal(draw(second), expected)
    assert second.unload() == []


def test_case_14_a_path_that_cannot_be_made_is_named(half_directory: Path) -> None:
    with pytest.raises(StorageFailed, match="/dev/null/below"):
        host(half_directory, offload=on_disk(Path("/dev/null/below")))


def test_case_14_a_disk_that_fails_half_way_leaves_nothing_behind(
    half_directory: Path, tmp_path: Path
) -> None:
    # A limit that the writer inherits stands for a full disk: the write itself fails.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(StorageFailed, match="cannot be written"):
            host(half_directory, offload=on_disk(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("*unfinished"))
    assert all(one.stat().st_size < 300_000 for one in tmp_path.iterdir())


def test_case_31_a_cancel_while_packing_ends_the_writer(
    half_directory: Path, tmp_path: Path
) -> None:
    calls = 0

    def cancel(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Cancelled("stop")

    description = describe(
        model_spec("cancelled", str(half_directory), {"offload": on_disk(tmp_path)}), True
    )
    plan = description.plan(1 << 40, 1 << 40, True)
    with pytest.raises(Cancelled):
        HostedModel.load(description, plan, device_host(), cancel)
    assert not [one for one in psutil.Process().children() if "pack_writer" in one.cmdline()]
    assert packed(tmp_path) == {}


def test_a_tensor_that_no_file_holds_is_refused_before_anything_is_packed(
    half_directory: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(half_directory, source)
    weights = load_file(source / UNET)
    weights.pop("conv_out.bias")
    save_file(weights, source / UNET)
    with pytest.raises(ModelLoadFailed, match=r"conv_out\.bias"):
        host(source, components={"unet": on_disk(tmp_path / "cache")})
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CACHE_DIRECTORY": "/var/cache/offloadd:/var/cache/more"}, "/var/cache/offloadd/packs"),
        ({"XDG_CACHE_HOME": "/home/me/cache"}, "/home/me/cache/offloadd/packs"),
        ({"HOME": "/home/me"}, "/home/me/.cache/offloadd/packs"),
    ],
)
def test_packs_go_to_the_cache_of_the_service_or_the_user(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CACHE_DIRECTORY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)
