"""What the contenders of `gpu` share: the model, its weights and inputs, and how time is taken."""

from __future__ import annotations

import gc
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import nn

from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.host_memory import bytes_of
from offloadd.store.host_source import HostSource
from offloadd.store.layout import Layout

MIB = 1024 * 1024
FLUX: dict[str, Any] = {"guidance_embeds": True}
"""diffusers' own defaults are FLUX.1's: 19 double and 38 single blocks, 24 heads of 128."""

SMALL: dict[str, Any] = {**FLUX, "num_layers": 3, "num_single_layers": 6}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders share."""

    accelerator: Accelerator
    config: dict[str, Any]
    image_side: int
    text_tokens: int
    steps: int

    @property
    def device(self) -> torch.device:
        return self.accelerator.device


def empty_model(setting: Setting) -> Any:
    """The transformer in bf16 with all parameters on meta."""
    with torch.device("meta"):
        module = diffusers.FluxTransformer2DModel(**setting.config)
    return module.to(torch.bfloat16).eval().requires_grad_(False)


def random_extent(layout: Layout, device: torch.device) -> HostSource:
    """Weights drawn on the device, which is fast, laid out in host memory of exact size."""
    descriptor = os.memfd_create("offloadd-bench", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, layout.size_bytes)
    view = memoryview(mmap.mmap(descriptor, layout.size_bytes))
    extent = bytes_of(view)
    generator = torch.Generator(device).manual_seed(0)
    for slot in layout.slots().values():
        noise = torch.randn(slot.spec.shape, generator=generator, device=device) * 0.02
        weight = noise.to(torch.bfloat16).contiguous().view(-1).view(torch.uint8)
        extent[slot.offset_bytes : slot.stop_bytes].copy_(weight)
    return HostSource(layout, descriptor, view.toreadonly())


def inputs(setting: Setting) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    side, device = setting.image_side, setting.device

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    grid = torch.cartesian_prod(
        torch.zeros(1), torch.arange(float(side)), torch.arange(float(side))
    )
    return {
        "hidden_states": noise(1, side * side, 64),
        "encoder_hidden_states": noise(1, setting.text_tokens, 4096),
        "pooled_projections": noise(1, 768),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16, device=device),
        "guidance": torch.tensor([3.5], dtype=torch.bfloat16, device=device),
        "img_ids": grid.to(device),
        "txt_ids": torch.zeros(setting.text_tokens, 3, device=device),
        "return_dict": False,
    }


def caller(setting: Setting, module: nn.Module) -> Callable[[], torch.Tensor]:
    """One step of the module."""
    arguments = inputs(setting)

    def run() -> torch.Tensor:
        result: torch.Tensor = module(**arguments)[0]
        return result

    return run


@contextmanager
def clean_device() -> Iterator[None]:
    """Nothing of one contender is left for the next."""
    try:
        yield
    finally:
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def peak_bytes() -> int:
    return int(torch.accelerator.max_memory_allocated()) if torch.accelerator.is_available() else 0


def timed(run: Callable[[], torch.Tensor], steps: int) -> tuple[float, torch.Tensor]:
    """Seconds a step, host and device together, and the last output."""
    output = run()
    synchronize()
    seconds = []
    for _ in range(steps):
        began_s = time.perf_counter()
        output = run()
        synchronize()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds), output.cpu()


def queued(run: Callable[[], torch.Tensor], steps: int) -> float:
    """Seconds a step when steps follow each other without the host waiting between them."""
    run()
    synchronize()
    began_s = time.perf_counter()
    for _ in range(steps):
        run()
    synchronize()
    return (time.perf_counter() - began_s) / steps


def load_resident(setting: Setting, source: HostSource, device: torch.device) -> nn.Module:
    """A plain model with its own copy of the weights on a device."""
    module: nn.Module = empty_model(setting)
    view = source.host_view()
    assert view is not None
    extent = bytes_of(view)
    module.to_empty(device=device)
    parameters = dict(module.named_parameters())
    for name, slot in source.layout.slots().items():
        weight = extent[slot.offset_bytes : slot.stop_bytes].view(torch.bfloat16)
        parameters[name].copy_(weight.view(slot.spec.shape))
    return module
