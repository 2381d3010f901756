"""Whatever a client sends, it gets a clear coded error, and the daemon goes on serving."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from system.daemons import Daemon

import offloadd.hosting
from offload_client import Client
from offload_protocol.errors import (
    InvalidRequest,
    ModelLoadFailed,
    OffloadError,
    TooLarge,
    Unauthorized,
    UnknownJob,
    UnknownModel,
    Unreachable,
)

pytestmark = pytest.mark.system

SHAPES = Path(offloadd.hosting.__file__).parent / "shapes"
PROMPT = "a green star on a black background"


def draws(daemon: Daemon) -> bool:
    with daemon.client() as client:
        result = client.generate("shapes", prompt=PROMPT, seed=3, num_inference_steps=1)
    return result.image.size == (64, 64)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompt": PROMPT, "promt": "x"}, "promt"),
        ({"prompt": PROMPT, "num_inference_steps": -1}, "num_inference_steps"),
        ({"prompt": PROMPT, "num_inference_steps": 0}, "num_inference_steps"),
        ({"prompt": PROMPT, "num_inference_steps": 10**9}, "num_inference_steps"),
        ({"prompt": PROMPT, "num_inference_steps": "four"}, "num_inference_steps"),
        ({"prompt": PROMPT, "height": 65}, "height"),
        ({"prompt": PROMPT, "guidance_scale": float("nan")}, "guidance_scale"),
        ({"prompt": PROMPT, "num_images_per_prompt": 10_000}, "num_images_per_prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": PROMPT, "callback_on_step_end": "print"}, "callback_on_step_end"),
        ({"prompt": PROMPT, "generator": 4}, "generator"),
        ({}, "prompt"),
    ],
)
def test_an_argument_that_the_pipeline_does_not_take_is_refused_by_name(
    daemon: Daemon, arguments: dict[str, Any], named: str
) -> None:
    with daemon.client() as client, pytest.raises(InvalidRequest, match=named):
        client.generate("shapes", **arguments)
    assert draws(daemon)


def test_a_prompt_of_a_megabyte_is_too_large(daemon: Daemon) -> None:
    with daemon.client() as client, pytest.raises(TooLarge):
        client.generate("shapes", prompt="x" * 1_000_000)
    assert draws(daemon)


def test_a_picture_of_a_terapixel_is_too_large(daemon: Daemon) -> None:
    with daemon.client() as client, pytest.raises(TooLarge, match="pixels"):
        client.generate("shapes", prompt=PROMPT, height=1 << 20, width=1 << 20)
    assert draws(daemon)


def test_unknown_names_are_said_so(daemon: Daemon) -> None:
    with daemon.client() as client:
        with pytest.raises(UnknownModel, match="shape"):
            client.generate("shape", prompt=PROMPT)
        with pytest.raises(UnknownJob):
            client.job("00" * 16).result(5)


def broken_copy(directory: Path, damage: str) -> tuple[Path, str]:
    """A copy of `shapes` with one fault, and what the error must name."""
    source = directory / damage
    shutil.copytree(SHAPES, source)
    weights = next((source / "unet").glob("*.safetensors"))
    if damage == "missing":
        weights.unlink()
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    return source, "unet" if damage == "missing" else weights.name


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_a_source_with_a_damaged_weight_file_is_refused_with_the_file_named(
    daemon: Daemon, tmp_path: Path, damage: str
) -> None:
    source, named = broken_copy(tmp_path, damage)
    with daemon.client() as client, pytest.raises(ModelLoadFailed, match=named) as caught:
        client.load(f"broken-{damage}", str(source))
    if damage == "truncated":
        size = (SHAPES / "unet" / named).stat().st_size
        assert str(size) in str(caught.value)
        assert str(size - 1000) in str(caught.value)
    assert draws(daemon)


@pytest.mark.parametrize("kind", ["absent", "not_a_pipeline"])
def test_a_source_that_is_no_pipeline_is_refused(daemon: Daemon, tmp_path: Path, kind: str) -> None:
    if kind == "not_a_pipeline":
        (tmp_path / kind).mkdir()
    with daemon.client() as client, pytest.raises(ModelLoadFailed, match=kind):
        client.load(f"none-{kind}", str(tmp_path / kind))
    assert draws(daemon)


def test_a_model_can_be_loaded_used_and_unloaded_under_another_name(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.load("again", str(SHAPES))
        assert client.generate("again", prompt=PROMPT, num_inference_steps=1, seed=1).images
        client.unload("again")
        with pytest.raises(UnknownModel):
            client.generate("again", prompt=PROMPT)


MALFORMED = [
    [],
    [b""],
    [b"\xc1"],
    [b"\x01\x02"],
    [b"\x91" * 3000],
    [b"\xdd\xff\xff\xff\xff"],
    [b"\xdf\xff\xff\xff\xff"],
    [b"\xa4\xff\xfe\xfd\xfc"],
    [b"\x81\x01\x02"],
    [b"\x82\xa2op\xa5hello\xa3rid\x01"],
    [b"\x82\xa2op\xa5hello\xa3rid\xa1x"],
    [b"\x82\xa2op\xa4evil\xa3rid\x01"],
    [b"plain text", b"", b"", b"", b""],
    [b"\x82\xa2op\xa4ping\xa3rid\x01"] + [b"x"] * 300,
]


@pytest.mark.parametrize("frames", MALFORMED, ids=range(len(MALFORMED)))
def test_case_36_a_malformed_message_is_answered_or_dropped_and_the_loop_lives(
    daemon: Daemon, frames: list[bytes]
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(daemon.endpoint)
        socket.send_multipart(frames or [b"", b""])
        time.sleep(0.05)
    with daemon.client() as client:
        client.ping()


def test_case_39_a_second_daemon_on_the_same_endpoint_is_refused_with_the_pid_of_the_first(
    daemon: Daemon,
) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "offloadd", "--endpoint", daemon.endpoint, "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode != 0
    assert str(daemon.process.pid) in second.stderr
    with daemon.client() as client:
        client.ping()


def test_no_daemon_is_said_within_two_seconds_with_what_was_tried(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/none.sock"
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"none\.sock"), Client(endpoint) as client:
        client.ping()
    assert time.monotonic() - started < 2.5
    command = [sys.executable, "-m", "offloadctl", "--endpoint", endpoint, "stats"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == 3
    assert "none.sock" in run.stderr


def test_errors_carry_a_code_and_a_hint(daemon: Daemon) -> None:
    with daemon.client() as client, pytest.raises(OffloadError) as caught:
        client.generate("shapes", prompt=PROMPT, num_inference_stepz=4)
    assert caught.value.code == "invalid_request"
    assert "num_inference_steps" in caught.value.hint
    assert not isinstance(caught.value, Unauthorized)


def test_settings_that_change_nothing_are_answered_with_a_sentence(daemon: Daemon) -> None:
    offload = {"mode": "group", "use_stream": True, "record_stream": True}
    with daemon.client() as client:
        try:
            loaded = client.load("noted", SHAPES, offload=offload)
            assert loaded.notes[0].startswith("record_stream, use_stream of offload change nothing")
            assert [one.notes for one in client.models() if one.name == "noted"] == [loaded.notes]
        finally:
            client.unload("noted")
