"""Trains the built-in model `shapes` from a seed alone and writes it as a diffusers directory.

python tools/train_shapes.py --out daemon/offloadd/hosting/shapes
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from shapes_training.training import FULL, QUICK, train


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model `shapes` on the CPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write it")
    parser.add_argument(
        "--seed", type=int, default=0, help="same seed and threads, same model (default: 0)"
    )
    parser.add_argument("--quick", action="store_true", help="seconds of training: a smoke test")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pipeline = train(QUICK if arguments.quick else FULL, arguments.seed)
    # Half precision halves what everyone downloads; readers cast on loading.
    for network in (pipeline.vae, pipeline.text_encoder, pipeline.unet):
        network.to(torch.float16)
    pipeline.save_pretrained(arguments.out, safe_serialization=True)


if __name__ == "__main__":
    main()
