"""The table of jobs: what is live, what is remembered, and for how long."""

from __future__ import annotations

from offload_protocol.messages import AdapterChoice, Submit
from offloadd.control.jobs import jobs
from offloadd.control.jobs.jobs import Job, JobTable, Owner, fingerprint, job_key


def job(name: str, user: str = "1", model: str = "m", ended_s: float | None = None) -> Job:
    request = Submit(rid=1, job=name, model=model, arguments={"prompt": "x"})
    one = Job(
        key=job_key(user, name),
        request=request,
        owner=Owner(user, "client"),
        fingerprint=fingerprint(request, ()),
        frames=(),
        submitted_at=1000.0,
        submitted_s=1.0,
        seed=0,
    )
    one.ended_s = ended_s
    return one


def test_a_job_that_may_give_its_adapters_a_scale_has_the_device_by_itself() -> None:
    one, ink = job("a"), AdapterChoice(name="ink")
    for adapters, wears in (([], ()), ([ink], None)):
        scaled = {"cross_attention_kwargs": {"scale": 0.5}}
        one.request = Submit(rid=1, job="a", model="m", arguments=scaled, adapters=adapters)
        assert one.wears == wears


def test_a_fingerprint_tells_requests_and_frames_apart_but_not_messages() -> None:
    request = Submit(rid=1, job="a", model="m", arguments={"prompt": "x"})
    again = Submit(rid=2, job="a", model="m", arguments={"prompt": "x"})
    other = Submit(rid=1, job="a", model="m", arguments={"prompt": "y"})
    frames = (memoryview(b"ab"), memoryview(b"c"))
    assert fingerprint(request, frames) == fingerprint(again, frames)
    different = {
        fingerprint(request, frames).digest,
        fingerprint(other, frames).digest,
        fingerprint(request, (memoryview(b"a"), memoryview(b"bc"))).digest,
        fingerprint(request, (memoryview(b"abc"),)).digest,
        fingerprint(request, ()).digest,
    }
    assert len(different) == 5


def test_users_find_their_own_jobs_and_administrators_all() -> None:
    table = JobTable()
    mine, theirs = job("a", user="1"), job("b", user="2")
    table.add(mine)
    table.add(theirs)
    assert table.find("1", "a", administrates=False) is mine
    assert table.find("1", "b", administrates=False) is None
    assert table.find("1", "b", administrates=True) is theirs


def test_ended_jobs_are_no_longer_live_and_expire_in_order() -> None:
    table = JobTable()
    for number in range(3):
        one = job(str(number), ended_s=float(number))
        table.add(one)
        if number < 2:
            assert table.ended(one) == []
    assert [one.request.job for one in table.live()] == ["2"]
    assert table.uses("m")
    assert table.expired(0.5) == ["1/0"]
    assert table.expired(9.0) == ["1/0", "1/1"]


def test_one_user_cannot_push_out_what_others_are_remembered_by() -> None:
    table = JobTable()
    first = job("kept", user="2", ended_s=0.0)
    table.add(first)
    table.ended(first)
    forgotten = []
    for number in range(jobs.MAX_TOMBSTONES + 2):
        one = job(str(number), user="1", ended_s=1.0)
        table.add(one)
        for key in table.ended(one):
            forgotten.append(key)
            table.remove(key)
    assert forgotten == ["1/0", "1/1"]
    assert len(table) == jobs.MAX_TOMBSTONES + 1
    assert table.find("2", "kept", administrates=False) is first


def test_results_that_were_taken_are_forgotten_before_those_that_nobody_has() -> None:
    table = JobTable()
    forgotten = []
    for number in range(jobs.MAX_TOMBSTONES + 4):
        one = job(str(number), user="1", ended_s=1.0)
        table.add(one)
        for key in table.ended(one):
            forgotten.append(key)
            table.remove(key)
        if number in (7, 9):
            table.taken(one)
    assert forgotten == ["1/7", "1/9", "1/0", "1/1"]


def test_times_of_a_job_add_up() -> None:
    one = job("a")
    one.started_s, one.running_since_s = 3.0, 3.5
    one.used_s, one.turn_since_s = 1.0, 8.0
    timings = one.timings(10.0)
    assert (timings.queued_s, timings.loading_s) == (2.0, 0.5)
    assert (timings.running_s, timings.parked_s) == (3.0, 3.5)
    one.ended_s = 9.0
    assert (one.timings(10.0).running_s, one.timings(10.0).parked_s) == (2.0, 3.5)
    waiting = job("b").timings(5.0)
    assert (waiting.queued_s, waiting.loading_s, waiting.running_s) == (4.0, 0.0, 0.0)
