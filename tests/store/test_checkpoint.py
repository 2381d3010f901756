"""Checkpoints are indexed whole, or refused with what is wrong and what to do about it."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
from store.checkpoints import INDEX_NAME, Arrays, arrays, raw_file, write_file, write_shards

from offload_protocol.errors import ModelLoadFailed
from offloadd.store.index import CheckpointIndex, read_checkpoint
from offloadd.store.index.naming import choose_weights

SHARDS = (
    "diffusion_pytorch_model-00001-of-00003.safetensors",
    "diffusion_pytorch_model-00002-of-00003.safetensors",
    "diffusion_pytorch_model-00003-of-00003.safetensors",
)


def shards() -> dict[str, Arrays]:
    return {
        name: arrays({f"part{at}.weight": (3, 5), f"part{at}.bias": (at + 1,)}, seed=at)
        for at, name in enumerate(SHARDS)
    }


def refusal(path: Path) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as caught:
        read_checkpoint(path)
    assert caught.value.hint
    assert caught.value.details["path"]
    return caught.value


def bytes_at(index: CheckpointIndex, name: str) -> bytes:
    place = index.tensors[name]
    blob = index.files[place.file_index].path.read_bytes()
    return blob[place.start_bytes : place.stop_bytes]


def test_a_sharded_checkpoint_gives_every_tensor_its_file_and_place(tmp_path: Path) -> None:
    written = shards()
    write_shards(tmp_path, written)
    index = read_checkpoint(tmp_path)
    every = {name: array for tensors in written.values() for name, array in tensors.items()}
    assert index.tensors.keys() == every.keys()
    assert all(bytes_at(index, name) == array.tobytes() for name, array in every.items())
    assert index.size_bytes == sum(array.nbytes for array in every.values())
    assert [file.path.name for file in index.files] == list(SHARDS)


@pytest.mark.parametrize(
    "folder", ["with space", 'it\'s "quoted"', "名前 ünï", "new\nline", "%s{}"]
)
def test_any_path_that_a_file_system_takes_is_read(tmp_path: Path, folder: str) -> None:
    written = shards()
    write_shards(tmp_path / folder, written)
    index = read_checkpoint(tmp_path / folder)
    assert bytes_at(index, "part1.weight") == written[SHARDS[1]]["part1.weight"].tobytes()


def test_case_22_a_missing_shard_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    write_shards(tmp_path, shards())
    (tmp_path / SHARDS[1]).unlink()
    error = refusal(tmp_path)
    assert str(tmp_path / SHARDS[1]) in error.message
    assert "is not there" in error.message


def test_case_22_every_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, shards())
    (tmp_path / SHARDS[0]).unlink()
    (tmp_path / SHARDS[2]).unlink()
    error = refusal(tmp_path)
    assert SHARDS[0] in error.message
    assert SHARDS[2] in error.message
    assert SHARDS[1] not in error.message


def test_case_22_a_tensor_dropped_from_a_shard_is_named_with_its_shard(tmp_path: Path) -> None:
    written = shards()
    write_shards(tmp_path, written)
    del written[SHARDS[1]]["part1.bias"]
    write_file(tmp_path / SHARDS[1], written[SHARDS[1]])
    error = refusal(tmp_path)
    assert f"part1.bias (in {SHARDS[1]})" in error.message
    assert error.details["missing"] == {"part1.bias": SHARDS[1]}


def test_case_22_every_tensor_that_the_model_needs_is_asked_for_with_its_shape(
    tmp_path: Path,
) -> None:
    write_shards(tmp_path, shards())
    index = read_checkpoint(tmp_path)
    index.require({"part0.weight": (3, 5), "part2.bias": (3,)})
    wanted = {"part0.weight": (5, 3), "gone.a": (1,), "part1.bias": (2,), "gone.b": (2, 2)}
    with pytest.raises(ModelLoadFailed) as caught:
        index.require(wanted)
    assert caught.value.details["missing"] == ["gone.a", "gone.b"]
    assert "gone.a, gone.b" in caught.value.message
    assert f"part0.weight in {SHARDS[0]} (expected [5, 3], found [3, 5])" in caught.value.message
    assert "part1.bias" not in caught.value.message


def test_what_the_index_does_not_place_is_ignored_even_where_a_shard_holds_it(
    tmp_path: Path,
) -> None:
    written = shards()
    write_shards(tmp_path, written)
    stranger = arrays({"part0.weight": (9, 9), "extra": (4,)}, seed=9)
    write_file(tmp_path / SHARDS[2], written[SHARDS[2]] | stranger)
    index = read_checkpoint(tmp_path)
    assert "extra" not in index.tensors
    assert bytes_at(index, "part0.weight") == written[SHARDS[0]]["part0.weight"].tobytes()
    assert index.ignored == ("extra", "part0.weight")


def test_case_23_a_shard_cut_to_half_says_both_sizes(tmp_path: Path) -> None:
    write_shards(tmp_path, shards())
    path = tmp_path / SHARDS[1]
    whole = path.stat().st_size
    os.truncate(path, whole - 20)
    error = refusal(tmp_path)
    assert error.message.startswith(f"{path} is cut short")
    assert (error.details["expected"], error.details["found"]) == (whole, whole - 20)
    assert "download" in error.hint


@pytest.mark.parametrize(
    ("content", "sentence", "kind"),
    [
        (b"", "is empty: it has 0 bytes", "empty"),
        (b"\x08\x00\x00", "is cut short: the file has 3 bytes", "truncated"),
        (struct.pack("<Q", 2**60) + b"{}", "its header claims 1152921504606846976", "bad_header"),
        (
            struct.pack("<Q", 500) + b"{}",
            "its header needs 508 bytes but the file has 10",
            "truncated",
        ),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "is a web page", "html"),
        (b"\n <html lang='en'>404", "is a web page", "html"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:"
            + b"a" * 64
            + b"\nsize 246144152\n",
            "not the weights of 246144152 bytes",
            "lfs_pointer",
        ),
        (pickle.dumps({"a": 1}), "is a Python pickle under a safetensors name", "pickle"),
        (b"PK\x03\x04rest of an archive", "is a zip archive", "archive"),
        (b"\x00" * 64, "its header does not begin with {", "bad_header"),
    ],
)
def test_case_23_what_is_no_safetensors_file_gets_a_sentence_of_its_own(
    tmp_path: Path, content: bytes, sentence: str, kind: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    error = refusal(tmp_path)
    assert str(path) in error.message
    assert sentence in error.message
    assert error.details["kind"] == kind
    assert error.details["found"] is not None


def test_case_23_a_fault_in_one_tensor_names_file_tensor_expected_and_found(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}
    path = raw_file(tmp_path / "model.safetensors", {"mid.weight": entry}, bytes(12))
    error = refusal(path)
    assert str(path) in error.message
    assert error.details["tensor"] == "mid.weight"
    assert (error.details["expected"], error.details["found"]) == (16, 12)


def test_a_dtype_that_the_store_does_not_hold_is_named(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}
    error = refusal(raw_file(tmp_path / "model.safetensors", {"w": entry}, bytes(2)))
    assert "'F4'" in error.message
    assert "saved in one of the dtypes" in error.hint


def test_a_link_into_a_cleaned_hub_cache_is_told_from_a_missing_file(tmp_path: Path) -> None:
    link = tmp_path / "model.safetensors"
    link.symlink_to("../../blobs/0123abcd")
    error = refusal(tmp_path)
    assert "link to the hub cache's blob ../../blobs/0123abcd, which is not there" in error.message
    assert "is not there" in refusal(tmp_path / "other.safetensors").message


def test_a_link_to_a_blob_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    write_file(tmp_path / "blobs" / "0123abcd", arrays({"w": (3,)}))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123abcd")
    assert list(read_checkpoint(tmp_path / "snapshot").tensors) == ["w"]


def test_case_24_pickled_weights_are_refused_and_never_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "it ran"),)

    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    for path in (tmp_path, tmp_path / "diffusion_pytorch_model.bin"):
        error = refusal(path)
        assert "diffusion_pytorch_model.bin" in error.message
        assert "pickles are not accepted" in error.message
        assert "safe_serialization=True" in error.hint
    assert not (tmp_path / "it ran").exists()


def test_case_24_sharded_pickles_are_refused_by_the_names_that_exist(tmp_path: Path) -> None:
    names = [f"diffusion_pytorch_model-0000{at}-of-00002.bin" for at in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(pickle.dumps({}))
    weight_map = {"a": names[0], "b": names[1]}
    (tmp_path / "diffusion_pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    assert refusal(tmp_path).details["found"] == names


def test_case_24_an_index_that_points_at_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "model.bin"}}))
    assert "'model.bin', which is not a safetensors file" in refusal(tmp_path).message


@pytest.mark.parametrize(
    "shard", ["../w.safetensors", "/etc/w.safetensors", "a/../w.safetensors", "a\\w.safetensors"]
)
def test_an_index_may_only_name_files_beside_it(tmp_path: Path, shard: str) -> None:
    write_file(tmp_path / "w.safetensors", arrays({"w": (2,)}))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": shard}}))
    error = refusal(folder)
    assert error.details["kind"] == "unsafe_reference"
    assert error.details["tensor"] == "w"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("<html>", "is a web page"),
        ("{", "is no sound shard index"),
        ("[]", "is no sound shard index"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
        ('{"weight_map": {"a": 3}}', "not the plain name of a file"),
    ],
)
def test_an_unsound_index_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    assert sentence in refusal(tmp_path).message


def test_shards_without_their_index_are_refused_by_that_name(tmp_path: Path) -> None:
    write_shards(tmp_path, shards())
    (tmp_path / INDEX_NAME).unlink()
    assert "3 shards" in refusal(tmp_path).message


def test_a_directory_without_weights_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no safetensors weights (found: config.json)" in refusal(tmp_path).message


def test_a_fifo_or_a_directory_under_a_weight_name_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "is a special file" in refusal(tmp_path).message
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    assert "is a directory" in refusal(tmp_path).message


@pytest.mark.parametrize(
    ("names", "variant", "chosen"),
    [
        (["model.safetensors"], None, "model.safetensors"),
        (["model.safetensors", "model.fp16.safetensors"], "fp16", "model.fp16.safetensors"),
        (["model.safetensors", "model.fp16.safetensors"], None, "model.safetensors"),
        (["model.safetensors"], "fp16", "model.safetensors"),
        (["model.fp16.safetensors"], None, None),
        ([INDEX_NAME, "diffusion_pytorch_model.safetensors"], None, INDEX_NAME),
        (
            ["model.safetensors.index.json", "model.safetensors"],
            None,
            "model.safetensors",
        ),
        (
            [INDEX_NAME, "diffusion_pytorch_model.safetensors.index.fp16.json"],
            "fp16",
            "diffusion_pytorch_model.safetensors.index.fp16.json",
        ),
        (
            [INDEX_NAME, "diffusion_pytorch_model.safetensors.fp16.index.json"],
            "fp16",
            "diffusion_pytorch_model.safetensors.fp16.index.json",
        ),
        (["model.safetensors.index.fp16.json"], "fp16", "model.safetensors.index.fp16.json"),
        (["diffusion_pytorch_model.bin", "config.json"], None, None),
    ],
)
def test_the_files_chosen_are_those_that_from_pretrained_would_take(
    names: list[str], variant: str | None, chosen: str | None
) -> None:
    found = choose_weights(names, variant)
    assert (found.name if found else None) == chosen
