"""Weights that rest on disk are never another model's, another component's or another run's."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy as np
import pytest
import torch
from hosting.hosting_help import Drawn, draw, host
from torch import nn

from offload_protocol.errors import StorageFailed
from offloadd.channel.specs import OffloadSpec
from offloadd.hosting import disk_rest
from offloadd.hosting.disk_rest import DiskRest
from offloadd.hosting.offloading import apply_plan


def on_disk(path: Path, level: str = "leaf_level") -> dict[str, Any]:
    return {"mode": "group", "offload_type": level, "offload_to_disk_path": str(path)}


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_case_12_two_models_on_one_path_keep_their_own_weights(
    sd_directory: Path,
    other_sd_directory: Path,
    references: dict[Path, Drawn],
    tmp_path: Path,
    level: str,
) -> None:
    first = host(sd_directory, offload=on_disk(tmp_path, level))
    second = host(other_sd_directory, offload=on_disk(tmp_path, level))
    np.testing.assert_array_equal(draw(first), references[sd_directory])
    np.testing.assert_array_equal(draw(second), references[other_sd_directory])
    assert first.unload() == []
    np.testing.assert_array_equal(draw(second), references[other_sd_directory])
    assert second.unload() == []
    assert list(tmp_path.iterdir()) == []


class Pair(NamedTuple):
    """Two components of one class, as pipelines with two experts have them."""

    first: nn.Module
    second: nn.Module

    @property
    def components(self) -> dict[str, nn.Module]:
        return {"first": self.first, "second": self.second}


def test_case_12_two_components_of_one_class_keep_their_own_weights(tmp_path: Path) -> None:
    pair = Pair(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    given = torch.ones(1, 4)
    expected = [module(given) for module in pair]
    spec = OffloadSpec(mode="group", offload_type="leaf_level", offload_to_disk_path=str(tmp_path))
    placement = apply_plan(pair, {"first": spec, "second": spec}, torch.device("cpu"))
    assert all(
        torch.equal(module(given), wanted) for module, wanted in zip(pair, expected, strict=True)
    )
    placement.remove()


def test_case_13_files_of_a_killed_process_are_removed_and_not_reused(
    sd_directory: Path, references: dict[Path, Drawn], tmp_path: Path
) -> None:
    script = (
        "import os, sys; from pathlib import Path; from offloadd.hosting.disk_rest import DiskRest;"
        "rest = DiskRest(Path(sys.argv[1])).component('unet', 0);"
        "(rest / 'group_0.safetensors').write_bytes(b'stale'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=False)
    (left,) = tmp_path.iterdir()
    model = host(sd_directory, offload=on_disk(tmp_path))
    assert not left.exists()
    np.testing.assert_array_equal(draw(model), references[sd_directory])
    model.unload()


def test_a_directory_in_use_by_another_holder_is_left_alone(tmp_path: Path) -> None:
    first = DiskRest(tmp_path)
    kept = first.component("unet", 0)
    second = DiskRest(tmp_path)
    assert kept.is_dir()
    assert second.component("unet", 0) != kept
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_case_14_a_disk_without_room_is_refused_before_anything_is_written(
    sd_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = os.statvfs(tmp_path)
    too_much = usage.f_bavail * usage.f_frsize
    monkeypatch.setattr(disk_rest, "_RESERVE_BYTES", too_much)
    with pytest.raises(StorageFailed, match="free") as refused:
        host(sd_directory, offload=on_disk(tmp_path))
    assert refused.value.details["path"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_case_14_a_disk_that_fails_half_way_leaves_nothing_behind(
    sd_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    written: list[Any] = []
    save_file = safetensors.torch.save_file

    def failing(tensors: Any, path: Any, **rest: Any) -> None:
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, **rest)

    monkeypatch.setattr(safetensors.torch, "save_file", failing)
    with pytest.raises(StorageFailed, match="No space left"):
        host(sd_directory, offload=on_disk(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_case_14_a_path_that_cannot_be_made_is_named(sd_directory: Path) -> None:
    with pytest.raises(StorageFailed, match="/dev/null/below"):
        host(sd_directory, offload=on_disk(Path("/dev/null/below")))


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_case_2_a_helper_reads_right_weights_after_the_forward(tmp_path: Path, level: str) -> None:
    def prior() -> Any:
        torch.manual_seed(0)
        module = diffusers.PriorTransformer(
            num_attention_heads=2, attention_head_dim=4, num_layers=2, embedding_dim=8,
            num_embeddings=3, additional_embeddings=4,
        )  # fmt: skip
        nn.init.normal_(module.clip_mean)
        nn.init.normal_(module.clip_std)
        return module.eval().requires_grad_(False)

    def answers(module: Any) -> list[torch.Tensor]:
        predicted = module(
            hidden_states=torch.ones(1, 8), timestep=1, proj_embedding=torch.ones(1, 8),
            encoder_hidden_states=torch.ones(1, 3, 8),
        ).predicted_image_embedding  # fmt: skip
        return [predicted, module.post_process_latents(torch.ones(1, 8))]

    expected, offloaded = answers(prior()), prior()
    spec = OffloadSpec(mode="group", offload_type=level, offload_to_disk_path=str(tmp_path))  # type: ignore[arg-type]
    placement = apply_plan(Pair(offloaded, nn.Identity()), {"first": spec}, torch.device("cpu"))
    for _ in range(2):
        assert all(
            torch.equal(one, two) for one, two in zip(answers(offloaded), expected, strict=True)
        )
    placement.remove()
