"""An SDXL-sized pipeline through the daemon on a CPU, in half of the memory that it needs.

    python bench/half_memory.py [--quick] [--json FILE] [--directory DIR]

Random bfloat16 weights in SDXL's sizes (6.9 GB; 0.1 GB with --quick). A plain diffusers script
draws two small pictures and tells how much memory it took (`plain_peak_bytes`). Then the daemon
draws them, the first one twice, inside a memory cgroup of half of that (`limit_bytes`; with
--quick, or where no cgroup can be made, only its `device_budget` is half of the weights). Fails
with 1 where a picture differs in a bit or the weights exceed their budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.memory_cgroup import MemoryCgroup, memory_cgroup
from bench.random_sdxl import write_sdxl

from offload_client import Client
from offload_protocol.errors import OffloadError

START_S = 120.0
REQUESTS = (("a red circle", 1), ("a blue square", 2), ("a red circle", 1))
CALL: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 5.0, "output_type": "np"}
OVERHEAD_BYTES = 1_700_000_000
"""What daemon, worker, libraries and activations take of the cgroup beside weights."""


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        source = Path(folder) / "sdxl"
        weights_bytes = write_sdxl(source, is_full=not options.quick)
        plain = _plain_in_a_process(source, Path(folder), options.quick)
        figures = {"weights_bytes": weights_bytes, "plain_peak_bytes": plain["peak_bytes"]}
        figures |= {"plain_s": plain["drawing_s"]}
        figures |= _hosted(source, Path(folder), figures, options.quick)
    for key, value in figures.items():
        print(f"{key:24} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(figures["wrong"] > 0 or figures["weights_peak_bytes"] > figures["budget_bytes"])


def _hosted(source: Path, folder: Path, plain: dict[str, Any], is_quick: bool) -> dict[str, Any]:
    limit_bytes = plain["plain_peak_bytes"] // 2
    budget_bytes = plain["weights_bytes"] // 2
    with contextlib.ExitStack() as stack:
        cgroup: MemoryCgroup | None = None
        if not is_quick:
            with contextlib.suppress(OSError):
                cgroup = stack.enter_context(memory_cgroup(limit_bytes))
                budget_bytes = limit_bytes - OVERHEAD_BYTES
        client = stack.enter_context(_daemon(folder, cgroup))
        began_s = time.monotonic()
        client.load("sdxl", source, dtype="bfloat16", device_budget=budget_bytes, timeout_s=600)
        loaded_s = time.monotonic()
        with _watched(client) as most:
            wrong, taken_s = 0, []
            for number, (prompt, seed) in enumerate(REQUESTS):
                start_s = time.monotonic()
                drawn = client.generate("sdxl", prompt, seed=seed, **_size(is_quick), **CALL)
                taken_s.append(round(time.monotonic() - start_s, 2))
                expected = np.load(folder / f"plain{number % 2}.npy")
                wrong += not np.array_equal(drawn.outputs["images"], expected)
        figures: dict[str, Any] = {"limit_bytes": limit_bytes if cgroup else 0}
        figures |= {"budget_bytes": budget_bytes, "weights_peak_bytes": most[0], "wrong": wrong}
        figures |= {"load_s": round(loaded_s - began_s, 2), "requests": len(REQUESTS)}
        figures |= {f"request_{number + 1}_s": one for number, one in enumerate(taken_s)}
        if cgroup:
            figures["cgroup_peak_bytes"] = cgroup.peak_bytes
    return figures


@contextlib.contextmanager
def _daemon(folder: Path, cgroup: MemoryCgroup | None) -> Iterator[Client]:
    endpoint = f"ipc://{folder}/d.sock"
    command = [sys.executable, "-m", "offloadd", "--endpoint", endpoint, "--device", "cpu"]
    # Each picture computes its prompt, as in the plain script.
    (folder / "offloadd.toml").write_text('[hosting]\nembeddings = "0"\n', encoding="utf-8")
    command += ["--config", str(folder / "offloadd.toml"), "--state-dir", str(folder / "state")]

    def enter() -> None:
        if cgroup is not None:
            (cgroup.path / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=enter)
    try:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                with Client(endpoint) as client:
                    yield client
                    return
            except OffloadError as error:
                if error.code != "unreachable" or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def _watched(client: Client) -> Iterator[list[int]]:
    """The most bytes of weights that the device was seen to hold."""
    most, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.05):
            device = client.stats()["devices"][0]
            most[0] = max(most[0], device["resident_bytes"] + device["ring_bytes"])

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        is_over.set()
        watcher.join()


def _plain_in_a_process(source: Path, folder: Path, is_quick: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--plain", str(source), "--directory", str(folder)]
    command += ["--quick"] if is_quick else []
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    figures: dict[str, Any] = json.loads(told.splitlines()[-1])
    return figures


def _draw_plainly(source: Path, folder: Path, is_quick: bool) -> None:
    import torch
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(source, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    taken_s = []
    for number, (prompt, seed) in enumerate(REQUESTS[:2]):
        start_s = time.monotonic()
        noise = torch.Generator("cpu").manual_seed(seed)
        drawn = pipeline(prompt, generator=noise, **_size(is_quick), **CALL).images
        taken_s.append(round(time.monotonic() - start_s, 2))
        np.save(folder / f"plain{number}.npy", drawn)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak_bytes, "drawing_s": min(taken_s)}))


def _size(is_quick: bool) -> dict[str, Any]:
    side = 64 if is_quick else 256
    return {"height": side, "width": side}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a pipeline of 0.1 GB")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--directory", type=Path, help="where the weights are written for a while")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = _options()
    if given.plain:
        _draw_plainly(given.plain, given.directory, given.quick)
        sys.exit(0)
    sys.exit(main())
