"""Jobs on a model that is better shared have the device together, are charged for it once, and give
way together."""

from __future__ import annotations

import pytest
from control.plane import OWNER, Plane

from offload_protocol.errors import WorkerCrashed
from offload_protocol.messages import AdapterChoice
from offload_protocol.records import ErrorInfo, Outcome, Timings
from offloadd.channel.messages import CancelJob, GiveWay, JobEnded, JobParked, ResumeJob, RunJob
from offloadd.channel.specs import AdapterSpec, ModelSpec
from offloadd.control.jobs.jobs import Job, Owner
from offloadd.control.workers.deaths import Death

DONE = Outcome(outputs={}, seeds=[1], timings=Timings(running_s=100.0))

OWNERS = [OWNER, Owner("2", "2:s", "q"), Owner("3", "3:s", "r"), Owner("4", "4:s", "s")]


@pytest.fixture
def plane() -> Plane:
    """Up to three jobs share a sweep of the model, as its first job has shown."""
    adapters = [AdapterSpec(name="ink", source="/ink.safetensors")]
    plane = Plane(ModelSpec(name="m", source="/m", adapters=adapters), max_sweep=3)
    plane.draw("first")
    plane.models.note_sharing("m", True)
    return plane


def submit(plane: Plane, count: int, **fields: object) -> list[Job]:
    return [plane.submit(f"job-{n}", OWNERS[n], **fields) for n in range(count)]


def started(plane: Plane) -> list[str]:
    return [order.job for order in plane.orders if isinstance(order, RunJob)]


def end(plane: Plane, job: Job) -> None:
    done = JobEnded(job=job.key, outcome=DONE, is_better_shared=True)
    plane.dispatcher.ended(done, ())


def park(plane: Plane, job: Job) -> None:
    plane.dispatcher.parked(JobParked(job=job.key))


def test_as_many_as_may_share_start_at_once_and_the_next_when_one_ends(plane: Plane) -> None:
    jobs = submit(plane, 4)
    assert started(plane) == [job.key for job in jobs[:3]]
    assert [job.state for job in jobs] == ["running"] * 3 + ["queued"]
    end(plane, jobs[0])
    assert started(plane) == [job.key for job in jobs]
    for job in jobs[1:]:
        end(plane, job)
    assert {job.state for job in jobs} == {"done"}
    assert plane.dispatcher.running is None


def test_jobs_on_a_model_that_computes_longer_than_it_loads_go_one_after_the_other(
    plane: Plane,
) -> None:
    plane.models.note_sharing("m", False)
    jobs = submit(plane, 2)
    assert started(plane) == [jobs[0].key]


def test_jobs_share_the_device_only_with_those_that_wear_the_same_adapters(plane: Plane) -> None:
    ink, more_ink = (AdapterChoice(name="ink", weight=one) for one in (1.0, 2.0))
    first = plane.submit("first-one", OWNERS[0], adapters=[ink])
    plane.submit("plain", OWNERS[1])
    plane.submit("another-weight", OWNERS[2], adapters=[more_ink])
    same = plane.submit("the-same", OWNERS[3], adapters=[ink])
    assert started(plane) == [first.key, same.key]


def test_the_time_is_charged_in_equal_parts(plane: Plane) -> None:
    jobs = submit(plane, 2)
    plane.now_s += 4.0
    end(plane, jobs[0])
    plane.now_s += 3.0
    end(plane, jobs[1])
    assert [job.charged_s for job in jobs] == [2.0, 5.0]
    assert [job.timings(plane.now_s).running_s for job in jobs] == [4.0, 7.0]


def test_all_are_asked_to_give_way_and_come_back_together(plane: Plane) -> None:
    jobs = submit(plane, 2)
    plane.now_s += 1.0
    plane.orders.clear()
    urgent = plane.submit("urgent", OWNERS[3], priority=5)
    # It may come beside them while that takes less time; otherwise both give way to it.
    assert started(plane) == [urgent.key]
    end(plane, urgent)
    plane.models.note_sharing("m", False)
    plane.orders.clear()
    urgent = plane.submit("very-urgent", OWNERS[3], priority=5)
    assert [order.job for order in plane.orders if isinstance(order, GiveWay)] == [
        job.key for job in jobs
    ]
    plane.orders.clear()
    park(plane, jobs[0])
    assert started(plane) == [], "the other still has the device"
    park(plane, jobs[1])
    assert started(plane) == [urgent.key]
    plane.orders.clear()
    end(plane, urgent)
    assert [order.job for order in plane.orders if isinstance(order, ResumeJob)] == [
        job.key for job in jobs
    ]


def test_one_that_is_cancelled_leaves_the_others_running(plane: Plane) -> None:
    jobs = submit(plane, 3)
    plane.dispatcher.cancel(jobs[0])
    assert CancelJob(job=jobs[0].key) in plane.orders
    stopped = ErrorInfo(code="cancelled", message="stopped")
    plane.dispatcher.ended(JobEnded(job=jobs[0].key, error=stopped), ())
    assert [job.state for job in jobs] == ["cancelled", "running", "running"]


def test_a_worker_that_dies_of_one_of_several_strikes_none_and_runs_each_alone(
    plane: Plane,
) -> None:
    jobs = submit(plane, 2)
    death = Death(WorkerCrashed("the worker died"), is_own_fault=True)
    plane.dispatcher.worker_lost(death)
    assert [(job.state, job.strikes) for job in jobs] == [("queued", 0)] * 2
    plane.orders.clear()
    plane.dispatcher.worker_ready()
    orders = [order for order in plane.orders if isinstance(order, RunJob)]
    assert [order.is_alone for order in orders] == [True]
    plane.dispatcher.worker_lost(death)
    assert sorted(job.strikes for job in jobs) == [0, 1]
