"""What diffusers and transformers really write, single and sharded, is found and read the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel

from offloadd.store.index import CheckpointIndex, read_checkpoint


def tiny_vae() -> Any:
    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2)


def tiny_encoder() -> Any:
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    return CLIPTextModel(config)


def assert_same(index: CheckpointIndex, model: Any) -> None:
    wanted = model.state_dict()
    index.require({name: tuple(tensor.shape) for name, tensor in wanted.items()})
    for name, tensor in wanted.items():
        place = index.tensors[name]
        blob = index.files[place.file_index].path.read_bytes()
        data = bytearray(blob[place.start_bytes : place.stop_bytes])
        found = torch.frombuffer(data, dtype=tensor.dtype)
        assert torch.equal(found.reshape(tensor.shape), tensor), name


@pytest.mark.parametrize("make", [tiny_vae, tiny_encoder])
@pytest.mark.parametrize("shard", ["1GB", "10KB"])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_saved_models_are_found_under_the_names_their_library_gives(
    tmp_path: Path, make: Any, shard: str, variant: str | None
) -> None:
    model = make()
    model.save_pretrained(tmp_path, max_shard_size=shard, variant=variant)
    index = read_checkpoint(tmp_path, variant=variant)
    assert (len(index.files) > 1) == (shard == "10KB")
    assert index.variant == variant
    assert index.ignored == ()
    assert_same(index, model)


@pytest.mark.parametrize("make", [tiny_vae, tiny_encoder])
def test_where_single_and_sharded_files_lie_together_each_library_s_own_choice_is_taken(
    tmp_path: Path, make: Any
) -> None:
    single, sharded = make(), make()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.add_(1)
    single.save_pretrained(tmp_path / "single")
    sharded.save_pretrained(tmp_path, max_shard_size="10KB")
    for path in (tmp_path / "single").glob("*.safetensors"):
        path.rename(tmp_path / path.name)
    theirs = type(single).from_pretrained(tmp_path)
    assert_same(read_checkpoint(tmp_path), theirs)
