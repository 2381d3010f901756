"""Jobs for sweeps: a few denoising steps of a tiny model, each job in a shape of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from offload.tiny_models import TINY_MODELS, first_tensor
from torch import nn

from offloadd.offload.streaming.executor import Executor
from offloadd.offload.sweep.state import GlobalRandomness, thread_state
from offloadd.offload.sweep.sweep import SweepRoom

Inputs = dict[str, Any]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """A number of steps from a start that the number `index` gives; `scale` is its guidance."""

    family: str
    index: int
    steps: int

    @property
    def name(self) -> str:
        return f"job {self.index}"

    def draw(self, module: nn.Module, after_step: Callable[[int], None] = lambda step: None) -> Any:
        """All steps; gives the latents at the end."""
        inputs = SHAPED[self.family](self.index)
        main = next(iter(inputs))
        with torch.no_grad():
            for step in range(self.steps):
                noise = first_tensor(module(**inputs))
                inputs[main] = inputs[main] - (0.1 + 0.01 * self.index) * noise
                after_step(step)
        return inputs[main]


def jobs(family: str, steps: Sequence[int]) -> list[Job]:
    """A job for each number of steps."""
    return [Job(family, index, count) for index, count in enumerate(steps)]


def alone(family: str, wanted: Sequence[Job]) -> list[Any]:
    """What each job draws on a resident model that it has for itself."""
    module = TINY_MODELS[family].build()
    return [job.draw(module) for job in wanted]


def room_of(executor: Executor, component: str = "model") -> SweepRoom:
    """A room whose members always share."""
    return SweepRoom(
        executor.gate,
        [component],
        limit=lambda name: 1 << 20,
        make_switch=lambda: GlobalRandomness(CPU),
        thread_state=thread_state(CPU),
    )


def sweep(
    room: SweepRoom,
    module: nn.Module,
    wanted: Sequence[Job],
    inside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Any]:
    """What the jobs draw together; each works inside a context of its own thread."""

    def work(job: Job) -> Any:
        with inside():
            return job.draw(module)

    futures = [room.join(job.name, lambda job=job: work(job)) for job in wanted]  # type: ignore[misc]
    assert not room.run()
    return [future.result(timeout=0) for future in futures]


def _flux(index: int) -> Inputs:
    generator = torch.Generator().manual_seed(index)
    rows, words = 2 + index, 3 + index
    image = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(4.0))
    return {
        "hidden_states": torch.randn(1, rows * 4, 16, generator=generator),
        "encoder_hidden_states": torch.randn(1, words, 32, generator=generator),
        "pooled_projections": torch.randn(1, 24, generator=generator),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([1.0 + index]),
        "img_ids": image,
        "txt_ids": torch.zeros(words, 3),
    }


def _sd_unet(index: int) -> Inputs:
    generator = torch.Generator().manual_seed(index)
    return {
        "sample": torch.randn(1 + index % 2, 4, 4 + 2 * index, 8, generator=generator),
        "timestep": torch.tensor(500 - index),
        "encoder_hidden_states": torch.randn(1 + index % 2, 5 + index, 24, generator=generator),
    }


SHAPED: dict[str, Callable[[int], Inputs]] = {"flux": _flux, "sd_unet": _sd_unet}
