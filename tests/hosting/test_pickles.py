"""Pickled weights: refused unless a model may have them, and then read for their tensors alone."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hosting.hosting_help import draw, host, plain_script
from hosting.tiny_pipelines import save_sd
from safetensors.torch import load_file

from offload_protocol.errors import ModelLoadFailed
from offloadd.channel.checked_specs import model_spec
from offloadd.hosting.packs.pickles import Unpickler
from offloadd.hosting.sources.describe import describe
from offloadd.store.index.naming import choose_pickles

STEM = "diffusion_pytorch_model"
WHOLE = [f"{STEM}-00001-of-00002.bin", f"{STEM}-00002-of-00002.bin"]


def pickled(directory: Path, shards: int = 1) -> Path:
    """Turn a saved pipeline's weights into pickles, as older versions of the libraries wrote."""
    for path in sorted(directory.rglob("*.safetensors")):
        stem = "pytorch_model" if path.stem == "model" else path.stem
        tensors = list(load_file(path).items())
        for at in range(shards):
            name = f"{stem}.bin" if shards == 1 else f"{stem}-{at + 1:05}-of-{shards:05}.bin"
            torch.save(dict(tensors[at::shards]), path.with_name(name))
        path.unlink()
    return directory


def test_case_24_pickles_are_refused_unless_the_model_may_have_them(tmp_path: Path) -> None:
    directory = pickled(save_sd(tmp_path / "m"))
    with pytest.raises(ModelLoadFailed, match="pickles are not accepted") as refused:
        describe(model_spec("m", str(directory), {}), True, unpickle=Unpickler(tmp_path / "cache"))
    assert "weights_only = true" in refused.value.hint
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("shards", [1, 2])
def test_case_24_a_model_that_may_have_them_draws_the_same_picture(
    tmp_path: Path, shards: int
) -> None:
    directory = save_sd(tmp_path / "m")
    expected = plain_script(directory)
    model = host(pickled(directory, shards), weights_only=True)
    np.testing.assert_array_equal(draw(model), expected)
    assert model.unload() == []


def test_case_24_a_hostile_pickle_is_refused_and_never_runs(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "it ran"),)

    directory = pickled(save_sd(tmp_path / "m"))
    unet = directory / "unet" / "diffusion_pytorch_model.bin"
    cache = tmp_path / "cache"
    spec = model_spec("m", str(directory), {"weights_only": True})
    torch.save({"w": Hostile()}, unet)
    for content in (unet.read_bytes(), pickle.dumps(Hostile()), pickle.dumps([1]), b""):
        unet.write_bytes(content)
        with pytest.raises(ModelLoadFailed, match="cannot be taken as weights only"):
            describe(spec, True, unpickle=Unpickler(cache))
    assert not (tmp_path / "it ran").exists()
    assert not [path for path in cache.iterdir() if path.suffix != ".safetensors"]


@pytest.mark.parametrize(
    ("names", "variant", "chosen"),
    [
        (["pytorch_model.bin", "training_args.bin"], None, ["pytorch_model.bin"]),
        (["pytorch_model.bin"], "fp16", ["pytorch_model.bin"]),
        (["pytorch_model.bin", "pytorch_model.fp16.bin"], "fp16", ["pytorch_model.fp16.bin"]),
        (["pytorch_model.fp16.bin"], None, []),
        (["pytorch_model-00002-of-00002.bin"], None, []),
        ([f"{STEM}-00002-of-00002.bin", f"{STEM}-00001-of-00002.bin"], None, WHOLE),
    ],
)
def test_the_pickles_of_one_variant_are_taken_whole_or_not_at_all(
    names: list[str], variant: str | None, chosen: list[str]
) -> None:
    assert choose_pickles(names, variant) == chosen
