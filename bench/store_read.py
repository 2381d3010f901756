"""How fast the disk reader fills memory from a sharded checkpoint, against raw O_DIRECT.

    python bench/store_read.py [--quick] [--json FILE] [--directory DIR]

Writes a checkpoint of random weights (1.5 GB; 0.4 GB with --quick), reads its whole extent into
memory that was never touched, and compares with raw O_DIRECT on the same files:
`read_over_odirect` is the best round over the best raw rate found before and after, over all
threads and chunk sizes; `read_over_odirect_paired` is the median of the rounds, each over the mean
of the raw passes (at the best setting) just before and just after it, which a busy machine
disturbs less.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.odirect import CHUNKS_BYTES, MIB, BestRate, best_rate, drop_caches

from offloadd.store.checkpoint_source import CheckpointSource
from offloadd.store.index import CheckpointIndex, read_checkpoint
from offloadd.store.layout import Layout, lay_out
from offloadd.store.reader import DEFAULT_CHUNK_BYTES, DEFAULT_THREADS, DiskReader

WIDTH = 1536
PIECE_BYTES = 64 * MIB


def main() -> int:
    options = _options()
    blocks, shards = (12, 2) if options.quick else (40, 3)
    chunks = CHUNKS_BYTES[::2] if options.quick else CHUNKS_BYTES
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        write_checkpoint(Path(folder), blocks=blocks, shards=shards)
        cold = drop_caches()
        index = read_checkpoint(Path(folder))
        layout = layout_of(index, blocks)
        bound_file = index.files[0].path
        before = best_rate(bound_file, chunks_bytes=chunks)
        rounds, raw = [], [raw_again(bound_file, before)]
        for _ in range(3 if options.quick else 5):
            rounds.append(read_once(index, layout, options.threads, options.chunk_mib * MIB))
            raw.append(raw_again(bound_file, before))
        after = best_rate(bound_file, chunks_bytes=chunks)
    figures = _figures(rounds, raw, before, after)
    figures |= {"extent_bytes": layout.size_bytes, "page_cache_dropped": cold}
    figures |= {"reader_threads": options.threads, "reader_chunk_bytes": options.chunk_mib * MIB}
    for key, value in figures.items():
        print(f"{key:32} {value}")
    if not cold:
        print(
            "the page cache could not be dropped (not root): only direct reads are sure to be cold"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def write_checkpoint(folder: Path, *, blocks: int, shards: int) -> None:
    """Blocks like a transformer's: four square matrices, two wide ones, biases of odd sizes."""
    random = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
        return random.integers(0, 2**16, size=shape, dtype=np.uint16)

    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"diffusion_pytorch_model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = {}
        for block in range(blocks * shard // shards, blocks * (shard + 1) // shards):
            for at in range(4):
                tensors[f"blocks.{block}.attn{at}.weight"] = weights(WIDTH, WIDTH)
                tensors[f"blocks.{block}.attn{at}.bias"] = weights(WIDTH + 1)
            tensors[f"blocks.{block}.up.weight"] = weights(2 * WIDTH, WIDTH)
            tensors[f"blocks.{block}.down.weight"] = weights(WIDTH, 2 * WIDTH)
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    path = folder / "diffusion_pytorch_model.safetensors.index.json"
    path.write_text(json.dumps(index), encoding="utf-8")


def layout_of(index: CheckpointIndex, blocks: int) -> Layout:
    units: dict[str, list[str]] = {f"blocks.{block}": [] for block in range(blocks)}
    for name in index.tensors:
        units[".".join(name.split(".")[:2])].append(name)
    return lay_out(
        (unit, [index.tensors[name].spec for name in names]) for unit, names in units.items()
    )


def read_once(index: CheckpointIndex, layout: Layout, threads: int, chunk_bytes: int) -> float:
    """Bytes per second of reading the extent in plan order into untouched memory."""
    with DiskReader(threads=threads, chunk_bytes=chunk_bytes) as reader:
        source = CheckpointSource(index, layout, reader)
        memory = mmap.mmap(-1, layout.size_bytes)
        view = memoryview(memory)
        begin = time.perf_counter()
        waiting = []
        for start in range(0, layout.size_bytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, layout.size_bytes)
            waiting.append(source.read(start, stop, view[start:stop]))
        read_bytes = sum(future.result() for future in waiting)
        return read_bytes / (time.perf_counter() - begin)


def raw_again(path: Path, best: BestRate) -> float:
    return best_rate(path, threads=[best.threads], chunks_bytes=[best.chunk_bytes]).bytes_per_s


def _figures(
    rounds: list[float], raw: list[float], before: BestRate, after: BestRate
) -> dict[str, float | int | bool]:
    bound = max(before.bytes_per_s, after.bytes_per_s)
    paired = [2 * rate / (raw[at] + raw[at + 1]) for at, rate in enumerate(rounds)]
    return {
        "read_over_odirect": round(max(rounds) / bound, 3),
        "read_over_odirect_paired": round(statistics.median(paired), 3),
        "read_bytes_per_s": round(statistics.median(rounds)),
        "odirect_before_bytes_per_s": round(before.bytes_per_s),
        "odirect_after_bytes_per_s": round(after.bytes_per_s),
        "odirect_threads": before.threads,
        "odirect_chunk_bytes": before.chunk_bytes,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Disk reader rate against raw O_DIRECT.")
    parser.add_argument("--quick", action="store_true", help="a smaller checkpoint, fewer chunks")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--directory", type=Path, help="where to write the checkpoint")
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS)
    parser.add_argument("--chunk-mib", type=int, default=DEFAULT_CHUNK_BYTES // MIB)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
