"""A rival of `store` in a process of its own: loads by `from_pretrained` and takes one step.

Not a bench by itself: `python bench/store_rivals.py KIND DIRECTORY`. It says `ready` when its
libraries are imported, waits for a line on stdin, and prints the seconds to the end of the step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.store_models import CALL

KINDS = ("from_pretrained", "group_offload_to_disk")


def main() -> None:
    kind, directory = sys.argv[1], Path(sys.argv[2])
    import diffusers
    import torch
    import transformers

    _ = (diffusers.FluxPipeline, diffusers.FluxTransformer2DModel, diffusers.AutoencoderKL)
    _ = (transformers.T5EncoderModel, transformers.CLIPTextModel)
    print("ready", flush=True)
    sys.stdin.readline()
    begin_s = time.perf_counter()
    pipeline = diffusers.FluxPipeline.from_pretrained(directory, torch_dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        if kind == "group_offload_to_disk":
            offload_to_disk(pipeline, Path(folder))
        pipeline(**CALL, num_inference_steps=1, output_type="latent")
        print(time.perf_counter() - begin_s, flush=True)
        sys.stdin.readline()


def offload_to_disk(pipeline: Any, folder: Path) -> None:
    """diffusers' group offloading to disk for every module, each with a directory of its own."""
    import torch
    from diffusers.hooks import apply_group_offloading

    for name, module in pipeline.components.items():
        if isinstance(module, torch.nn.Module):
            apply_group_offloading(
                module,
                onload_device=torch.device("cpu"),
                offload_type="block_level",
                num_blocks_per_group=1,
                offload_to_disk_path=str(folder / name),
            )


if __name__ == "__main__":
    main()
