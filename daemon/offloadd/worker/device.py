"""Finds the device that this process owns and measures its memory; never takes another instead.

A CPU counts as a device of its own: its memory is the host's, within the control group's limit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil
import torch

from offload_protocol.errors import InternalError
from offloadd.channel.messages import DeviceReport, EmbeddingFigures, Placed
from offloadd.offload.engine_stats import MeasuredSpeed

_log = logging.getLogger(__name__)
_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_CGROUP = Path("/sys/fs/cgroup")
NOTHING_PLACED: Mapping[str, Placed] = MappingProxyType({})
NOTHING_KEPT = EmbeddingFigures()


class DeviceMissing(InternalError):
    """The device that was asked for is not there, or cannot be used by this process."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device by torch's name for it, with its index, and by the maker's."""

    torch_device: torch.device
    name: str

    @property
    def is_cpu(self) -> bool:
        return self.torch_device.type == "cpu"


@dataclass(frozen=True, slots=True)
class Memory:
    total_bytes: int
    free_bytes: int


def find_device(choice: str) -> Device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`.

    `auto` is an accelerator if torch can use one, and the CPU only where there is none. Raises
    `DeviceMissing` with what was looked for.
    """
    if choice == "cpu":
        return _cpu()
    if choice != "auto":
        return _cuda(torch.device(choice).index or 0)
    if torch.cuda.is_available():
        return _cuda(0)
    nodes = [node for node in _NODES if Path(node).exists()]
    if nodes and torch.version.cuda is None and torch.version.hip is None:
        _log.warning("%s is here, but this torch is built for CPUs only; using the CPU", nodes[0])
    elif nodes:
        raise DeviceMissing(
            f"{nodes[0]} is here, but torch {torch.__version__} cannot use it",
            hint="check its permissions, the driver and CUDA_VISIBLE_DEVICES, "
            "or ask for the CPU with --device cpu",
        )
    return _cpu()


def measure(device: Device) -> Memory:
    """The device's memory, measured now."""
    if not device.is_cpu:
        free, total = torch.cuda.mem_get_info(device.torch_device)
        return Memory(total, free)
    host = psutil.virtual_memory()
    group = _control_group()
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return Memory(host.total, host.available)
    left = limit - used + _reclaimable_bytes(group)
    return Memory(min(host.total, limit), max(0, min(host.available, left)))


def report(
    device: Device,
    resident_bytes: int,
    ring_bytes: int = 0,
    host_bytes: int = 0,
    parked_bytes: int = 0,
    placed: Mapping[str, Placed] = NOTHING_PLACED,
    measured: MeasuredSpeed | None = None,
    embeddings: EmbeddingFigures = NOTHING_KEPT,
) -> DeviceReport:
    """What the control plane is told about the device."""
    memory = measure(device)
    return DeviceReport(
        device=str(device.torch_device),
        name=device.name,
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        resident_bytes=resident_bytes,
        ring_bytes=ring_bytes,
        host_bytes=host_bytes,
        parked_bytes=parked_bytes,
        reusable_bytes=_reusable_bytes(device),
        placed=dict(placed),
        link_bytes_per_s=measured.link_bytes_per_s if measured else 0.0,
        compute_s=dict(measured.compute_s) if measured else {},
        embeddings=embeddings,
    )


def _reusable_bytes(device: Device) -> int:
    if device.is_cpu:
        return 0
    where = device.torch_device
    return torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)


def _cpu() -> Device:
    return Device(torch.device("cpu"), _cpu_name())


def _cuda(index: int) -> Device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise DeviceMissing(
            f"cuda:{index} was asked for, and torch {torch.__version__} sees {count} such devices",
            hint="check the driver, CUDA_VISIBLE_DEVICES and that torch is a CUDA build",
        )
    device = torch.device("cuda", index)
    try:
        # A device can be listed and still refuse a context: exclusive mode, no memory, a fault.
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError as error:
        raise DeviceMissing(f"{device} cannot be used: {str(error).splitlines()[0]}") from None
    torch.cuda.set_device(device)
    return Device(device, torch.cuda.get_device_name(device))


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


def _control_group() -> Path:
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        return _CGROUP
    paths = [line.removeprefix("0::/") for line in own.splitlines() if line.startswith("0::/")]
    return _CGROUP / paths[0] if paths else _CGROUP


def _reclaimable_bytes(group: Path) -> int:
    # Cached file pages count as used by the group, and are given up when memory is short.
    try:
        text = (group / "memory.stat").read_text()
    except OSError:
        return 0
    counts = dict(line.split() for line in text.splitlines())
    return int(counts.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
