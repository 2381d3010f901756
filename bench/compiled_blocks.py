"""Whether blocks that inductor compiled stream as they are: same bits, nothing compiled again.

A tiny Flux transformer, its blocks compiled one by one (regional compilation), once plain and once
streamed from disk with a budget of 60% of its weights. Needs a C++ compiler; the first run compiles
for a minute or more, later ones find torch's cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from offload.rig import cpu_device, disk_source
from offload.tiny_models import TINY_MODELS

from offloadd.offload.engine import Engine
from offloadd.offload.grouping.groups import GroupOptions

BUDGET_SHARE = 0.6
ROUNDS = 8
SEEDS = (0, 1)
BLOCKS = ("transformer_blocks", "single_transformer_blocks")


def main() -> None:
    """Print the figures, and write them to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(2 if options.quick else ROUNDS)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures))


def measure(rounds: int) -> dict[str, float | bool]:
    """Run both and compare every output."""
    family = TINY_MODELS["flux"]
    plain, streamed = family.build(), family.build()
    started_s = time.perf_counter()
    compile_blocks(plain)
    expected = [family.run(plain, family.example_inputs(seed)) for seed in SEEDS]
    compiling_s = time.perf_counter() - started_s
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    equal: list[bool] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        disk_source(streamed, Path(directory) / "weights.safetensors") as source,
    ):
        engine = Engine(cpu_device(), int(source.layout.size_bytes * BUDGET_SHARE))
        engine.attach("flux", streamed, source, GroupOptions(small_limit_bytes=0))
        compile_blocks(streamed)
        for _ in range(rounds):
            for seed, wanted in zip(SEEDS, expected, strict=True):
                drawn = family.run(streamed, family.example_inputs(seed))
                equal.append(torch.equal(drawn, wanted))
        engine.close()
    return {
        "outputs_equal": all(equal),
        "outputs_compared": len(equal),
        "graphs_of_the_plain_model": graphs,
        "graphs_of_both": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "compiling_s": round(compiling_s, 1),
    }


def compile_blocks(model: nn.Module) -> None:
    """Compile each repeated block by itself."""
    for name in BLOCKS:
        for block in model.get_submodule(name).children():
            block.compile(backend="inductor")


if __name__ == "__main__":
    main()
