"""A second request with the same prompt, over the first, where nothing of the model is resident.

    python bench/embeddings.py [--quick] [--json FILE] [--directory DIR]

A PixArt with random bfloat16 weights (T5 of 0.54 GB, transformer of 0.35 GB; a hundredth of that
with --quick), hosted by the daemon on a CPU in the mode `sequential` with a budget below its
weights, so that every layer is read from disk for each use. Pairs of requests with a prompt that is
new and the same one again, with other seeds, two steps each. `moved_over_first` and
`seconds_over_first` are the medians of second over first. Fails with 1 where a picture differs in a
bit from that of the same model without reuse.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.random_sdxl import filled
from bench.store_daemon import daemon

from offload_client import Client

PAIRS = 5
CALL: dict[str, Any] = {
    "num_inference_steps": 2,
    "height": 128,
    "width": 128,
    "max_sequence_length": 64,
    "use_resolution_binning": False,
    "clean_caption": False,
    "output_type": "np",
}


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        source = Path(folder) / "pixart"
        weights_bytes = _write(source, is_quick=options.quick)
        with daemon(Path(folder) / "run", {}, embeddings="256MiB") as it:
            figures = _measured(it.endpoint, source, weights_bytes)
    figures = {"weights_bytes": weights_bytes, **figures}
    for key, value in figures.items():
        print(f"{key:24} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(not figures["outputs_equal"])


def _measured(endpoint: str, source: Path, weights_bytes: int) -> dict[str, Any]:
    with Client(endpoint) as client:
        for name, reuse in (("reused", True), ("anew", False)):
            client.load(
                *(name, source),
                offload="sequential",
                device_budget=weights_bytes // 2,
                dtype="bfloat16",
                reuse_embeddings=reuse,
                timeout_s=600,
            )
        client.generate("reused", "a first picture", seed=0, **CALL)
        firsts, seconds, are_equal = [], [], []
        for number in range(PAIRS):
            prompt = f"a picture with the number {'one ' * (number + 1)}"
            first, second = (
                client.generate("reused", prompt, seed=2 * number + again, **CALL)
                for again in range(2)
            )
            plain = client.generate("anew", prompt, seed=2 * number + 1, **CALL)
            are_equal.append(np.array_equal(second.outputs["images"], plain.outputs["images"]))
            firsts.append((first.moved_bytes, first.timings.running_s))
            seconds.append((second.moved_bytes, second.timings.running_s))
        stats = client.stats()["embeddings"]
    pairs = list(zip(firsts, seconds, strict=True))
    return {
        "first_moved_bytes": firsts[-1][0],
        "second_moved_bytes": seconds[-1][0],
        "moved_over_first": _ratio(pairs, 0),
        "seconds_over_first": _ratio(pairs, 1),
        "kept_bytes": stats["size_bytes"] // max(stats["entries"], 1),
        "outputs_equal": all(are_equal),
    }


def _ratio(pairs: list[Any], which: int) -> float:
    ratio = statistics.median(two[which] / one[which] for one, two in pairs)
    return float(round(ratio, 3))


def _write(directory: Path, *, is_quick: bool) -> int:
    width, layers = (64, 4) if is_quick else (1024, 16)
    heads, blocks = (4, 2) if is_quick else (16, 12)
    text = transformers.T5Config(
        vocab_size=160,
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=max(width // 64, 1),
        feed_forward_proj="gated-gelu",
    )
    with torch.device("meta"):
        parts: dict[str, Any] = {
            "text_encoder": transformers.T5EncoderModel(text),
            "transformer": diffusers.PixArtTransformer2DModel(
                num_attention_heads=heads,
                attention_head_dim=64,
                in_channels=4,
                out_channels=8,
                num_layers=blocks,
                cross_attention_dim=64 * heads,
                sample_size=16,
                caption_channels=width,
            ),
            "vae": diffusers.AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(32,) * 4,
                latent_channels=4,
            ),
        }
    parts = {name: filled(module) for name, module in parts.items()}
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = [(piece, -1.0 * index) for index, piece in enumerate(pieces)]
    vocabulary += [(f"<extra_id_{number}>", 0.0) for number in range(99, -1, -1)]
    pipeline = diffusers.PixArtSigmaPipeline(
        **parts,
        tokenizer=transformers.T5Tokenizer(vocab=vocabulary),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )
    pipeline.save_pretrained(directory)
    return sum(one.nbytes for part in parts.values() for one in part.parameters())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the weights")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--directory", type=Path, help="where the weights are written for a while")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
