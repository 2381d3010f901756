"""One contender of `cpu_stream`, in a process of its own: hosts the model its way and times steps.

Not a bench by itself. It enters its memory cgroup before it imports anything large, so that all it
allocates counts, and prints one JSON object: seconds of each step, a digest of the output, and what
it knows about its memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadd.store.layout import align

if TYPE_CHECKING:
    import torch
    from torch import nn

    from offloadd.offload.grouping.groups import Grouping, GroupOptions
    from offloadd.store.checkpoint_source import CheckpointSource
    from offloadd.store.reader import DiskReader

STEPS_TO_SETTLE = 12
"""More than the engine takes from its first pass to its last plan."""

IMAGE_SIDE = 16
"""256 image tokens are 16 by 16 patches."""

TEXT_TOKENS = 64
CONFIG: dict[str, Any] = {
    "num_layers": 4,
    "num_single_layers": 10,
    "attention_head_dim": 128,
    "num_attention_heads": 12,
    "joint_attention_dim": 1024,
    "pooled_projection_dim": 256,
    "axes_dims_rope": (16, 56, 56),
}
Run = Callable[[], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Hosted:
    """A contender ready to run: one step, what it says about its memory, how to end it."""

    run: Run
    details: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


def build(folder: Path) -> None:
    """Write the model with random bf16 weights."""
    import diffusers
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    diffusers.FluxTransformer2DModel(**CONFIG).save_pretrained(folder, max_shard_size="8GB")


def inputs() -> dict[str, Any]:
    """The same for every contender."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    side = torch.arange(float(IMAGE_SIDE))
    grid = torch.cartesian_prod(torch.zeros(1), side, side)
    return {
        "hidden_states": noise(1, IMAGE_SIDE**2, 64),
        "encoder_hidden_states": noise(1, TEXT_TOKENS, CONFIG["joint_attention_dim"]),
        "pooled_projections": noise(1, CONFIG["pooled_projection_dim"]),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "img_ids": grid,
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
        "return_dict": False,
    }


def _loaded(folder: Path) -> Any:
    import diffusers
    import torch

    return diffusers.FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)


def _caller(module: nn.Module) -> Run:
    arguments = inputs()

    def run() -> torch.Tensor:
        result: torch.Tensor = module(**arguments)[0]
        return result

    return run


def resident(options: argparse.Namespace) -> Hosted:
    """All weights in memory of their own."""
    module = _loaded(options.folder)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return Hosted(_caller(module))


def diffusers_group(options: argparse.Namespace) -> Hosted:
    """diffusers' group offloading to disk, at block level."""
    import torch
    from diffusers.hooks import apply_group_offloading

    module = _loaded(options.folder)
    cpu = torch.device("cpu")
    apply_group_offloading(
        module,
        onload_device=cpu,
        offload_device=cpu,
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(options.scratch),
    )
    return Hosted(_caller(module))


def accelerate_disk(options: argparse.Namespace) -> Hosted:
    """accelerate's disk offload."""
    import torch
    from accelerate import disk_offload

    module = _loaded(options.folder)
    disk_offload(module, str(options.scratch), execution_device=torch.device("cpu"))
    return Hosted(_caller(module))


def aircanvas(options: argparse.Namespace) -> Hosted:
    """AirCanvas' streaming engine with its own prefetcher and ring sizes; nothing resident."""
    splitter: Any = import_module("aircanvas.sharding.splitter")
    streaming: Any = import_module("aircanvas.streaming.engine")
    manifest = splitter.split_model(str(options.folder), cache_dir=options.scratch, subfolder="")
    module = _empty()
    engine = streaming.StreamingEngine(module, manifest, options.scratch, device="cpu")
    return Hosted(_caller(module), close=engine.close)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The model without weights, and where they are."""

    module: Any
    options: GroupOptions
    grouping: Grouping
    source: CheckpointSource
    reader: DiskReader

    def close(self) -> None:
        self.source.close()
        self.reader.close()

    def ring_bytes(self, slots: float) -> int:
        """Room for so many of the largest group, each starting on a page."""
        largest = max(self.grouping.sizes_bytes())
        return int(slots * align(largest, 4096))


def _empty() -> Any:
    """The model in bf16 with all weights on meta."""
    import diffusers
    import torch

    with torch.device("meta"):
        module = diffusers.FluxTransformer2DModel(**CONFIG)
    return module.to(torch.bfloat16).eval().requires_grad_(False)


def _parts(options: argparse.Namespace) -> _Parts:
    from offloadd.offload.grouping.groups import GroupOptions, group_module
    from offloadd.store.checkpoint_source import CheckpointSource
    from offloadd.store.index import read_checkpoint
    from offloadd.store.reader import DiskReader

    module = _empty()
    group_options = GroupOptions(options.level)
    grouping = group_module(module, group_options)
    reader = DiskReader(threads=options.threads)
    source = CheckpointSource(read_checkpoint(options.folder), grouping.layout, reader)
    return _Parts(module, group_options, grouping, source, reader)


def ours(options: argparse.Namespace) -> Hosted:
    """The engine under its own plan, with `share` of the weights as budget above a small ring."""
    from offloadd.offload.accelerator.cpu import CpuAccelerator
    from offloadd.offload.engine import Engine

    parts = _parts(options)
    budget_bytes = parts.grouping.leftover_bytes + parts.ring_bytes(options.slots)
    budget_bytes += int(options.share * parts.grouping.layout.size_bytes)
    engine = Engine(CpuAccelerator(), budget_bytes)
    engine.attach("flux", parts.module, parts.source, parts.options)
    run = _caller(parts.module)
    for _ in range(STEPS_TO_SETTLE):
        run()
    plan, stats = engine.plan("flux"), engine.stats()
    assert plan is not None
    details = {
        "budget_bytes": budget_bytes,
        "resident_bytes": stats.resident_bytes,
        "ring_bytes": stats.ring_bytes,
        "streamed_bytes": plan.streamed_bytes_per_step,
        "predicted_s": plan.predicted_step_s,
        "stage": stats.components[0].stage,
    }

    def close() -> None:
        engine.close()
        parts.close()

    return Hosted(run, details, close)


def nothing_resident(options: argparse.Namespace) -> Hosted:
    """The executor alone, told to keep no group at all and given a ring of a few groups."""
    from offloadd.offload.accelerator.cpu import CpuAccelerator
    from offloadd.offload.component import attach_component
    from offloadd.offload.streaming.executor import Executor
    from offloadd.offload.streaming.tier import DeviceTier

    parts = _parts(options)
    ring_bytes = parts.ring_bytes(options.slots)
    accelerator = CpuAccelerator()
    budget_bytes = parts.grouping.leftover_bytes + ring_bytes
    tier = DeviceTier(accelerator, budget_bytes)
    executor = Executor(accelerator, tier)
    component = attach_component(
        "flux", parts.module, parts.grouping, parts.source, accelerator, tier, executor
    )
    executor.configure("flux", frozenset(), ring_bytes)
    run = _caller(parts.module)
    run()
    details = {
        "budget_bytes": budget_bytes,
        "resident_bytes": parts.grouping.leftover_bytes,
        "ring_bytes": ring_bytes,
        "streamed_bytes": sum(parts.grouping.sizes_bytes()),
        "predicted_s": 0.0,
        "stage": "fixed",
    }

    def close() -> None:
        component.detach()
        parts.close()

    return Hosted(run, details, close)


CONTENDERS = {
    "resident": resident,
    "diffusers": diffusers_group,
    "accelerate": accelerate_disk,
    "aircanvas": aircanvas,
    "ours": ours,
    "nothing": nothing_resident,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=[*CONTENDERS, "build"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--cgroup", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.0)
    parser.add_argument("--slots", type=float, default=2.0)
    parser.add_argument("--level", default="leaf_level")
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    if options.cgroup is not None:
        (options.cgroup / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    if options.contender == "build":
        build(options.folder)
        return 0
    import torch

    with torch.no_grad():
        hosted = CONTENDERS[options.contender](options)
        hosted.run()
        hosted.run()
        steps_s = []
        for _ in range(options.steps):
            began_s = time.perf_counter()
            output = hosted.run()
            steps_s.append(time.perf_counter() - began_s)
        hosted.close()
    digest = hashlib.sha256(output.view(torch.uint8).numpy().tobytes()).hexdigest()
    print(json.dumps({"steps_s": steps_s, "digest": digest, **hosted.details}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
