"""No more jobs share a sweep than the device has room for beside the weights."""

from __future__ import annotations

import pytest
from control.plane import Plane
from control.test_sweeps import DONE, OWNERS, end, started, submit

from offloadd.channel.messages import DeviceReport, JobEnded
from offloadd.channel.specs import ModelSpec
from offloadd.control.scheduling.sweep_room import jobs_that_fit


def report(free_bytes: int, reusable_bytes: int = 0, device: str = "cuda:0") -> DeviceReport:
    return DeviceReport(
        device=device,
        name="",
        total_bytes=100,
        free_bytes=free_bytes,
        reusable_bytes=reusable_bytes,
    )


@pytest.mark.parametrize(
    ("device", "activations_bytes", "fit"),
    [
        (report(40), 10, 4),
        (report(39), 10, 3),
        # What the process's allocator keeps for itself is free to the next job as well.
        (report(9, reusable_bytes=11), 10, 2),
        (report(5), 10, 1),
        (report(40), 0, 1),
        (report(0, device="cpu"), 10, None),
        (None, 10, None),
    ],
)
def test_as_many_fit_as_are_measured_to_and_one_always_does(
    device: DeviceReport | None, activations_bytes: int, fit: int | None
) -> None:
    assert jobs_that_fit(device, activations_bytes) == fit


def test_one_is_alone_until_it_has_shown_what_it_takes_and_then_as_many_start_as_fit() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"), max_sweep=3)
    plane.draw("loads")
    plane.models.note_sharing("m", True)
    plane.dispatcher.device_measured(report(25))
    jobs = submit(plane, 4)
    assert started(plane) == [jobs[0].key], "nothing is known of what it takes"
    done = JobEnded(job=jobs[0].key, outcome=DONE, is_better_shared=True, activations_bytes=10)
    plane.dispatcher.ended(done, ())
    assert started(plane) == [job.key for job in jobs[:3]], "two fit"
    end(plane, jobs[1])
    assert started(plane) == [job.key for job in jobs]


def test_what_several_took_together_says_nothing_of_one() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"), max_sweep=3)
    plane.draw("loads")
    plane.models.note_sharing("m", True)
    jobs = submit(plane, 2)
    for job in jobs:
        done = JobEnded(job=job.key, outcome=DONE, is_better_shared=True, activations_bytes=1000)
        plane.dispatcher.ended(done, ())
    plane.dispatcher.device_measured(report(25))
    plane.submit("alone", OWNERS[0])
    plane.submit("next", OWNERS[1])
    (model,) = plane.models
    assert model.activations_bytes == 0
    assert len(started(plane)) == 3
