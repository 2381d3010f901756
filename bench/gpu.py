"""One script of a few minutes that checks on a GPU every promise of the engine that needs one.

A FLUX-sized transformer with random weights: resident, under diffusers' group offloading (stream
with record_stream, block and leaf level), and under the engine with about 0, 25, 50 and 75% of its
weights on the device. Also the link's bandwidth in the same run, how much host memory the weights
take page-locked, and whether every output is the resident model's, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.gpu_setting import (
    FLUX,
    MIB,
    SMALL,
    Setting,
    caller,
    clean_device,
    empty_model,
    load_resident,
    peak_bytes,
    queued,
    random_extent,
    timed,
)

from offloadd.offload.accelerator.interface import Accelerator
from offloadd.offload.accelerator.torch_device import TorchAccelerator
from offloadd.offload.engine import Engine
from offloadd.offload.grouping.groups import GroupOptions, group_module, module_layout
from offloadd.offload.host_memory import bytes_of
from offloadd.store.host_source import HostSource

SHARES = (0.0, 0.25, 0.5, 0.75)
RING_GROUPS = 3
STEPS_TO_SETTLE = 12
Figures = dict[str, float | int | bool | str]


def link(accelerator: Accelerator, extent: torch.Tensor, repeats: int = 8) -> float:
    """Host to device, bytes a second, from page-locked memory on the transfer queue."""
    size_bytes = min(1024 * MIB, extent.nbytes)
    block = accelerator.allocate(size_bytes)
    began, ended = accelerator.event(timed=True), accelerator.event(timed=True)
    fresh = accelerator.event()
    fresh.record(accelerator.compute_queue())
    accelerator.transfer_queue.wait(fresh)
    accelerator.copy(block, extent[:size_bytes])
    began.record(accelerator.transfer_queue)
    for _ in range(repeats):
        accelerator.copy(block, extent[:size_bytes])
    ended.record(accelerator.transfer_queue)
    ended.synchronize()
    accelerator.compute_queue().wait(ended)
    return repeats * size_bytes / began.elapsed_s(ended)


def measure_resident(setting: Setting, source: HostSource) -> tuple[Figures, torch.Tensor]:
    module = load_resident(setting, source, setting.device)
    run = caller(setting, module)
    step_s, output = timed(run, setting.steps)
    figures: Figures = {
        "resident_step_s": step_s,
        "resident_queued_step_s": queued(run, setting.steps),
        "resident_peak_bytes": peak_bytes(),
    }
    return figures, output


def measure_diffusers(
    setting: Setting, source: HostSource, expected: torch.Tensor, level: str
) -> Figures:
    name = f"diffusers_{level.partition('_')[0]}"
    module: Any = load_resident(setting, source, torch.device("cpu"))
    rss_before = psutil.Process().memory_info().rss
    module.enable_group_offload(
        onload_device=setting.device,
        offload_device=torch.device("cpu"),
        offload_type=level,
        num_blocks_per_group=1 if level == "block_level" else None,
        use_stream=True,
        record_stream=True,
        non_blocking=True,
    )
    run = caller(setting, module)
    step_s, output = timed(run, setting.steps)
    return {
        f"{name}_step_s": step_s,
        f"{name}_queued_step_s": queued(run, setting.steps),
        f"{name}_peak_bytes": peak_bytes(),
        f"{name}_host_growth_bytes": psutil.Process().memory_info().rss - rss_before,
        f"{name}_equal": torch.equal(output, expected),
    }


def measure_ours(
    setting: Setting, source: HostSource, expected: torch.Tensor, share: float
) -> Figures:
    name = f"ours_{share:.0%}".replace("%", "")
    module = empty_model(setting)
    options = GroupOptions("block_level")
    grouping = group_module(module, options)
    weights_bytes = grouping.leftover_bytes + RING_GROUPS * max(grouping.sizes_bytes())
    weights_bytes += int(share * grouping.layout.size_bytes)
    engine = Engine(setting.accelerator, weights_bytes)
    engine.attach("flux", module, source, options)
    run = caller(setting, module)
    first = run().cpu()
    # What activations need is measured now, and comes on top of what weights may take.
    engine.replan(budget_bytes=weights_bytes + engine.stats().reserve_bytes)
    for _ in range(STEPS_TO_SETTLE):
        run()
    counters = engine.counters
    syncs, misses, moved_bytes = counters.host_syncs, counters.misses, counters.moved_bytes
    step_s, output = timed(run, setting.steps)
    back_to_back_s = queued(run, setting.steps)
    forwards = 2 * setting.steps + 2
    plan, stats = engine.plan("flux"), engine.stats()
    assert plan is not None
    figures: Figures = {
        f"{name}_step_s": step_s,
        f"{name}_queued_step_s": back_to_back_s,
        f"{name}_predicted_s": plan.predicted_step_s,
        f"{name}_resident_bytes": stats.resident_bytes,
        f"{name}_ring_bytes": stats.ring_bytes,
        f"{name}_reserve_bytes": stats.reserve_bytes,
        f"{name}_streamed_bytes": plan.streamed_bytes_per_step,
        f"{name}_moved_bytes_per_step": (counters.moved_bytes - moved_bytes) // forwards,
        f"{name}_peak_bytes": peak_bytes(),
        f"{name}_host_syncs": counters.host_syncs - syncs,
        f"{name}_misses": counters.misses - misses,
        f"{name}_equal": torch.equal(output, expected) and torch.equal(first, expected),
    }
    engine.close()
    return figures


def measure_pinning(setting: Setting, source: HostSource) -> Figures:
    """The link, and what page-locking the store's own memory costs."""
    view = source.host_view()
    assert view is not None
    extent = bytes_of(view)
    rss_before, began_s = psutil.Process().memory_info().rss, time.perf_counter()
    unpin = setting.accelerator.pin(view)
    figures: Figures = {
        "weights_bytes": source.layout.size_bytes,
        "pin_s": time.perf_counter() - began_s,
        "pinned": unpin is not None,
        "store_view_is_pinned": bool(extent.is_pinned()) if unpin is not None else False,
        "pin_host_growth_bytes": psutil.Process().memory_info().rss - rss_before,
        "link_bytes_per_s": link(setting.accelerator, extent),
    }
    if unpin is not None:
        unpin()
    return figures


def measure(setting: Setting, skip_diffusers: bool) -> Figures:
    source = random_extent(module_layout(empty_model(setting)), setting.device)
    figures: Figures = {"torch": torch.__version__, "device": str(setting.device)}
    if setting.device.type == "cuda":
        figures["device_name"] = torch.cuda.get_device_name(setting.device)

    def add(more: Figures) -> None:
        for key, value in more.items():
            print(f"{key}: {value}", flush=True)
        figures.update(more)

    add(measure_pinning(setting, source))
    with clean_device():
        resident, expected = measure_resident(setting, source)
    add(resident)
    for share in SHARES:
        with clean_device():
            add(measure_ours(setting, source, expected, share))
    for level in () if skip_diffusers else ("block_level", "leaf_level"):
        with clean_device():
            add(measure_diffusers(setting, source, expected, level))
    _compare(figures)
    return figures


def _compare(figures: Figures) -> None:
    """Ratios that the documentation quotes: over the bound, and against diffusers."""
    over = []
    for share in SHARES:
        name = f"ours_{share:.0%}".replace("%", "")
        streamed_s = float(figures[f"{name}_streamed_bytes"]) / float(figures["link_bytes_per_s"])
        bound_s = max(float(figures["resident_queued_step_s"]), streamed_s)
        over.append(float(figures[f"{name}_queued_step_s"]) / bound_s)
        figures[f"{name}_over_bound"] = over[-1]
    figures["worst_over_bound"] = max(over)
    figures["outputs_equal"] = all(bool(v) for k, v in figures.items() if k.endswith("_equal"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the model")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--skip-diffusers", action="store_true")
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        print("torch sees no accelerator on this machine; there is nothing to measure here")
        return 1
    device = torch.accelerator.current_accelerator()
    assert device is not None
    setting = Setting(
        accelerator=TorchAccelerator(device),
        config=SMALL if options.quick else FLUX,
        image_side=32 if options.quick else 64,
        text_tokens=128 if options.quick else 512,
        steps=options.steps,
    )
    with torch.no_grad():
        figures = measure(setting, options.skip_diffusers)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
