"""Sweeps on a whole engine: several components, plans in the making, and members that wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from offload.rig import cpu_device, disk_source, host_source, simulated_device
from offload.sweep_jobs import Job, jobs
from offload.tiny_models import TINY_MODELS
from torch import nn

from offload_protocol.errors import Cancelled
from offloadd.offload.accelerator.simulated import Link
from offloadd.offload.engine import Engine
from offloadd.offload.grouping.groups import GroupOptions, module_layout

LEAVES = GroupOptions("leaf_level", small_limit_bytes=0)


def _bytes_of(module: nn.Module) -> int:
    return module_layout(module).size_bytes


def test_a_pipeline_of_three_components_from_cold_shares_what_is_entered_by_its_forward(
    tmp_path: Path,
) -> None:
    wanted = jobs("flux", (3, 2, 3, 4))
    encoder, denoiser, decoder = (TINY_MODELS[name] for name in ("t5", "flux", "vae"))
    modules = {"t5": encoder.build(), "flux": denoiser.build(), "vae": decoder.build()}

    def draw(job: Job, modules: dict[str, nn.Module]) -> list[torch.Tensor]:
        words = encoder.run(modules["t5"], encoder.example_inputs(job.index))
        latents = job.draw(modules["flux"])
        return [words, latents, decoder.run(modules["vae"], decoder.example_inputs(job.index))]

    expected = [draw(job, modules) for job in wanted]
    engine = Engine(cpu_device(), int(0.5 * _bytes_of(modules["flux"])))
    with (
        disk_source(modules["t5"], tmp_path / "t5.safetensors") as t5_source,
        disk_source(modules["flux"], tmp_path / "flux.safetensors") as flux_source,
        disk_source(modules["vae"], tmp_path / "vae.safetensors") as vae_source,
    ):
        for name, source in (("t5", t5_source), ("flux", flux_source), ("vae", vae_source)):
            engine.attach(name, modules[name], source, LEAVES)
        room = engine.sweep("t5", "flux")
        for _ in range(3):
            futures = [room.join(job.name, lambda job=job: draw(job, modules)) for job in wanted]  # type: ignore[misc]
            passes = room.passes
            assert not room.run()
            for future, pictures in zip(futures, expected, strict=True):
                assert all(map(torch.equal, future.result(), pictures))
            stats = engine.stats()
            assert stats.resident_bytes + stats.ring_bytes <= engine.budget_bytes
        # With plans made, the four encode at once, and there are four steps at most.
        assert room.passes - passes == 1 + 4
        engine.close()


class ReadingItsChildren(nn.Module):
    """Its own forward reads the weight of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(24, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.first.weight
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.first.weight


def test_members_that_wait_while_a_component_is_grouped_anew_go_on_with_the_new_groups(
    tmp_path: Path,
) -> None:
    module = ReadingItsChildren()
    starts = [torch.full((2 + number, 24), 0.1 + number) for number in range(4)]
    expected = [module(start) for start in starts]
    device = simulated_device(5)
    engine = Engine(device, int(0.9 * _bytes_of(module)))

    def work(start: torch.Tensor) -> list[torch.Tensor]:
        with device.watched():
            return [module(start) for _ in range(4)]

    with host_source(module, tmp_path / "m.safetensors") as source:
        engine.attach("m", module, source, LEAVES)
        room = engine.sweep("m")
        futures = [
            room.join(str(number), lambda start=start: work(start))  # type: ignore[misc]
            for number, start in enumerate(starts)
        ]
        assert not room.run()
        assert engine.is_planned("m")
        for future, picture in zip(futures, expected, strict=True):
            assert all(torch.equal(one, picture) for one in future.result())
        grouping = engine._plannings["m"].component.grouping
        assert "first.weight" in {tensor.spec.name for tensor in grouping.leftovers}
        engine.close()
    assert device.hazards == []


def test_a_cancel_at_the_root_takes_no_weight_from_those_who_are_inside(tmp_path: Path) -> None:
    module = ReadingItsChildren()
    x = torch.ones(2, 24)
    expected = module(x)
    engine = Engine(cpu_device(), int(0.9 * _bytes_of(module)))

    def cancel(component: str) -> None:
        raise Cancelled("the job was cancelled")

    with disk_source(module, tmp_path / "m.safetensors") as source:
        engine.attach("m", module, source, LEAVES)
        for _ in range(12):
            before = engine.counters.misses
            module(x)
            misses = engine.counters.misses - before
        room = engine.sweep("m")
        members = [room.join(str(number), lambda: module(x)) for number in range(2)]
        stopped = room.join("stopped", lambda: module(x), on_border=cancel)
        members.append(room.join("late", lambda: module(x)))
        before = engine.counters.misses
        assert not room.run()
        assert room.passes == 1
        assert engine.counters.misses - before == misses, "as in one step of one job"
        assert all(torch.equal(member.result(), expected) for member in members)
        assert isinstance(stopped.exception(), Cancelled)
        engine.close()


def test_the_engines_own_border_is_told_of_every_members_border(tmp_path: Path) -> None:
    tiny = TINY_MODELS["flux"]
    module = tiny.build()
    borders: list[str] = []
    engine = Engine(cpu_device(), _bytes_of(module) // 2, on_border=borders.append)
    with disk_source(module, tmp_path / "m.safetensors") as source:
        engine.attach("m", module, source, LEAVES)
        room = engine.sweep("m")
        for job in jobs("flux", (2, 3)):
            room.join(job.name, lambda job=job: job.draw(module))  # type: ignore[misc]
        assert not room.run()
        engine.close()
    assert borders == ["m"] * 5


def test_a_name_can_be_had_once_at_a_time() -> None:
    room = Engine(cpu_device(), 1 << 20).sweep("m")
    first = room.join("a", lambda: 1)
    with pytest.raises(ValueError, match="takes part already"):
        room.join("a", lambda: 2)
    assert not room.run()
    assert first.result() == 1
    again = room.join("a", lambda: 3)
    assert not room.run()
    assert again.result() == 3


def test_a_thread_of_the_callers_attends_as_well_as_one_of_the_rooms() -> None:
    room = Engine(cpu_device(), 1 << 20).sweep("m")
    began: list[str] = []

    def own() -> None:
        with room.attending("own"):
            began.append("own")

    thread = threading.Thread(target=own)
    thread.start()
    while not room.members:
        time.sleep(0.001)
    assert began == []
    assert not room.run()
    thread.join()
    assert began == ["own"]


def test_what_waits_for_bytes_is_better_shared_and_what_waits_for_compute_is_not(
    tmp_path: Path,
) -> None:
    tiny = TINY_MODELS["flux"]
    found = []
    for bandwidth_bytes_per_s in (1e5, 1e12):
        module = tiny.build()
        device = simulated_device(1, Link(bandwidth_bytes_per_s))
        engine = Engine(device, int(0.6 * _bytes_of(module)))
        module.get_submodule("transformer_blocks.0").register_forward_hook(
            lambda *_, device=device: device.compute(0.01)
        )
        path = tmp_path / f"{bandwidth_bytes_per_s}.safetensors"
        with host_source(module, path) as source:
            engine.attach("m", module, source, LEAVES)
            assert not engine.is_transfer_limited("m"), "nothing is known before the first pass"
            for _ in range(3):
                tiny.run(module, tiny.example_inputs())
            found.append(engine.is_transfer_limited("m"))
            engine.close()
    assert found == [True, False]
