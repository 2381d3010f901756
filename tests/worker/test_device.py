"""The device is the one that was asked for, and its memory is measured within its limits."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from offloadd.worker import device as device_room
from offloadd.worker.device import DeviceMissing, find_device, measure, report

MIB = 1 << 20


def test_the_cpu_is_always_there() -> None:
    device = find_device("cpu")
    assert device.is_cpu
    assert device.name


def test_free_memory_is_at_most_what_the_host_has() -> None:
    memory = measure(find_device("cpu"))
    assert 0 < memory.free_bytes <= memory.total_bytes <= psutil.virtual_memory().total


def test_a_control_group_limits_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{70 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {10 * MIB}\ninactive_file {20 * MIB}\n")
    monkeypatch.setattr(device_room, "_control_group", lambda: tmp_path)
    memory = measure(find_device("cpu"))
    assert (memory.total_bytes, memory.free_bytes) == (100 * MIB, 50 * MIB)


@pytest.mark.parametrize("limit", ["max", None])
def test_a_control_group_without_a_limit_limits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(device_room, "_control_group", lambda: tmp_path)
    assert measure(find_device("cpu")).total_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize("choice", ["cuda:0", "cuda", "cuda:7"])
def test_case_56_a_missing_accelerator_is_named(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceMissing, match="cuda:"):
        find_device(choice)


def test_case_56_auto_does_not_hide_an_accelerator_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "nvidia0"
    node.touch()
    monkeypatch.setattr(device_room, "_NODES", (str(node),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(DeviceMissing, match=str(node)) as missing:
        find_device("auto")
    assert "CUDA_VISIBLE_DEVICES" in missing.value.hint


def test_auto_with_a_torch_for_cpus_only_says_so_and_takes_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = tmp_path / "nvidia0"
    node.touch()
    monkeypatch.setattr(device_room, "_NODES", (str(node),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert find_device("auto").is_cpu
    assert str(node) in caplog.text


def test_the_report_names_device_and_memory() -> None:
    told = report(find_device("cpu"), resident_bytes=5)
    assert (told.device, told.resident_bytes) == ("cpu", 5)
    assert told.total_bytes > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator is here")
def test_auto_is_the_first_accelerator() -> None:
    device = find_device("auto")
    assert device.torch_device == torch.device("cuda:0")
    assert measure(device).total_bytes > 0
