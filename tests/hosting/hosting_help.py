"""Loads tiny pipelines through the hosting room, and draws with them as the tests compare it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from offload_protocol.values import Frame, pack, unpack
from offloadd.channel.arena import ExtentOpened, OpenExtent
from offloadd.channel.base import FromWorker
from offloadd.channel.checked_specs import model_spec
from offloadd.hosting.device_host import DeviceHost, accelerator_for
from offloadd.hosting.hosted import HostedModel
from offloadd.hosting.running.arguments import prepare_call
from offloadd.hosting.sources.describe import describe
from offloadd.offload.accelerator.cpu import CpuAccelerator
from offloadd.offload.accelerator.interface import Accelerator
from offloadd.store.arena.alone import Alone
from offloadd.store.arena.client import ArenaClient
from offloadd.store.reader import DiskReader

Drawn = npt.NDArray[np.float32]

CPU = torch.device("cpu")
SEED = 11
CALL: dict[str, Any] = {
    "prompt": "a cat on a mat",
    "num_inference_steps": 3,
    "height": 16,
    "width": 16,
    "output_type": "np",
}


def call_arguments(directory: Path, **changes: Any) -> dict[str, Any]:
    """The tests' usual call, with the length that the pipeline's text encoder can take."""
    is_flux = (directory / "transformer").is_dir()
    extra = {"max_sequence_length": 16} if is_flux else {}
    return {**CALL, **extra, **changes}


def plain_script(
    directory: Path, seed: int = SEED, dtype: torch.dtype | None = None, **changes: Any
) -> Drawn:
    """What plain diffusers draws, without any of our code."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directory, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator("cpu").manual_seed(seed)
    images: Drawn = pipeline(generator=noise, **call_arguments(directory, **changes)).images
    return images


_numbers = count()


class NoRoom(Alone):
    """A control plane whose host budget is spent: whatever is opened rests on disk."""

    def send(self, message: FromWorker) -> None:
        if isinstance(message, OpenExtent):
            self.answer(ExtentOpened(request=message.request, segments=[]), ())
        else:
            super().send(message)


def host_without_room() -> DeviceHost:
    """A CPU on which no weights can be held."""
    plane, reader = NoRoom(), DiskReader(threads=2)
    arena = ArenaClient(reader, plane.send)
    plane.answer = arena.handle
    return DeviceHost(CpuAccelerator(), Path("/nowhere"), arena, reader)


def new_device_host(accelerator: Accelerator) -> DeviceHost:
    """What the models of one worker share; packs go with the process."""
    cache_directory = Path(tempfile.mkdtemp(prefix="offloadd-test-"))
    atexit.register(shutil.rmtree, cache_directory, ignore_errors=True)
    reader = DiskReader(threads=2)
    return DeviceHost(accelerator, cache_directory, ArenaClient.alone(reader), reader)


def device_host(device: torch.device = CPU) -> DeviceHost:
    """One for all tests that do not need another."""
    return _only_device_host(device)


@cache
def _only_device_host(device: torch.device) -> DeviceHost:
    return new_device_host(accelerator_for(device))


def host(
    directory: Path, device: torch.device = CPU, on: DeviceHost | None = None, **options: Any
) -> HostedModel:
    """A model loaded for the device with these settings."""
    on = on or device_host(device)
    on_cpu = on.computes_in_host_memory
    spec = model_spec(f"tiny{next(_numbers)}", str(directory), options)
    description = describe(spec, on_cpu, on.arena.recall, on.unpickler())
    plan = description.plan(on.total_bytes, on.total_bytes, on_cpu)
    return HostedModel.load(description, plan, on, lambda done, total: None)


def over_the_wire(value: Any) -> Any:
    """A value as it is at the other end of a connection."""
    frames: list[Frame] = []
    body = msgspec.msgpack.encode(pack(value, frames))
    return unpack(msgspec.msgpack.decode(body), [bytes(frame) for frame in frames])


def run(
    model: HostedModel, arguments: dict[str, Any], seed: int = SEED, owner: str | None = None
) -> dict[str, Any]:
    """All outputs of a hosted model, with arguments and outputs over the wire."""
    description = model.description
    call = prepare_call(
        over_the_wire(arguments), description.parameters, seed, model.device, description.dtype
    )
    drawn = model.run(call, lambda step, steps: None, lambda: None, owner=owner)
    outputs: dict[str, Any] = over_the_wire(drawn)
    return outputs


def same_values(here: Any, there: Any) -> None:
    """Both hold the same numbers in the same shapes and dtypes."""
    if isinstance(there, (list, tuple)):
        assert len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            same_values(one, other)
    elif isinstance(there, Image.Image):
        assert (here.mode, here.size) == (there.mode, there.size)
        assert here.tobytes() == there.tobytes()
    elif there is None:
        assert here is None
    else:
        there = there.numpy() if isinstance(there, torch.Tensor) else there
        assert (here.dtype, here.shape) == (there.dtype, there.shape)
        np.testing.assert_array_equal(here, there)


def draw(
    model: HostedModel,
    seed: int = SEED,
    *,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
    at_border: Callable[[], None] = lambda: None,
    **changes: Any,
) -> Drawn:
    """Draw with a hosted model; gives its images."""
    description = model.description
    arguments = call_arguments(description.files.directory, **changes)
    call = prepare_call(arguments, description.parameters, seed, model.device, description.dtype)
    images: Drawn = model.run(call, on_step, at_border)["images"]
    return images
