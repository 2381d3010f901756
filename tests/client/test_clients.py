"""Either client against a real peer: calls, results, errors, waits, life cycle."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.conftest import Twin
from client.peer import STEPS, Caller, Peer, finished, ignore, info_of
from PIL import Image

from offload_client import (
    Busy,
    Cancelled,
    IdConflict,
    InvalidRequest,
    ModelLoadFailed,
    OffloadError,
    Progress,
    ProtocolMismatch,
    Result,
    TimedOut,
    TooLarge,
    UnknownJob,
    Unreachable,
)
from offload_protocol.messages import Finished, Submit
from offload_protocol.messages import Progress as ProgressMessage
from offload_protocol.records import ErrorInfo, Outcome


def wait_for(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def refusing(code: str, **details: Any) -> Callable[[Caller, Any], None]:
    return lambda caller, request: caller.refuse(request, code, **details)


def test_generate_gives_picture_seed_and_costs(twin: Twin, peer: Peer) -> None:
    result: Result = twin.do(twin.client(peer.endpoint).generate("shapes", "a red dot", seed=7))
    assert result.image.getpixel((0, 0)) == (255, 0, 0)
    assert (result.seed, result.seeds, result.model) == (7, (7,), "shapes")
    assert (result.peak_device_bytes, result.moved_bytes) == (5, 6)


def test_generate_sends_prompt_seed_and_all_other_arguments(twin: Twin, peer: Peer) -> None:
    client = twin.client(peer.endpoint)
    twin.do(
        client.generate(
            "shapes", "x", seed=3, priority=2, job_id="mine", run_timeout_s=5, height=64
        )
    )
    (submit,) = (request for request in peer.heard if isinstance(request, Submit))
    assert submit.arguments == {"prompt": "x", "height": 64}
    said = (submit.job, submit.seed, submit.priority, submit.run_timeout_s)
    assert said == ("mine", 3, 2, 5)


def test_adapters_are_sent_with_a_weight_of_one_unless_given(twin: Twin, peer: Peer) -> None:
    client = twin.client(peer.endpoint)
    chosen = [{"name": "ink"}, {"name": "oil", "weight": 2}]
    twin.do(client.generate("shapes", "x", adapters=chosen))
    (submit,) = (request for request in peer.heard if isinstance(request, Submit))
    assert [(one.name, one.weight) for one in submit.adapters] == [("ink", 1.0), ("oil", 2.0)]
    wrongs: list[Any] = [[{"weight": 1}], [{"name": "ink", "weight": "much"}], ["ink"], 3]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest, match="adapters are not understood"):
            twin.do(client.generate("shapes", "x", adapters=wrong))


def test_progress_is_told_in_its_order_and_ends_with_done(twin: Twin, peer: Peer) -> None:
    seen: list[Progress] = []
    twin.do(twin.client(peer.endpoint).generate("shapes", "x", on_progress=seen.append))
    assert [event.step for event in seen if event.state == "running"] == list(range(STEPS + 1))
    assert seen[0] == Progress("queued", 1, 0, 0)
    assert seen[-1] == Progress("done", None, STEPS, STEPS)


def test_the_daemon_hears_when_a_result_was_taken(twin: Twin, peer: Peer) -> None:
    result = twin.do(twin.client(peer.endpoint).generate("shapes", "x"))
    wait_for(lambda: peer.count("taken") == 1)
    assert peer.heard[-1].job == result.job


def test_a_result_that_nobody_asked_for_is_not_taken(twin: Twin, peer: Peer) -> None:
    client = twin.client(peer.endpoint)
    job = twin.do(client.submit("shapes", "x"))
    twin.listed(job.events())
    twin.do(client.ping())
    assert peer.count("taken") == 0
    twin.do(job.result())
    wait_for(lambda: peer.count("taken") == 1)


def test_a_job_tells_its_events_state_and_result(twin: Twin, peer: Peer) -> None:
    job = twin.do(twin.client(peer.endpoint).submit("shapes", "x"))
    assert [event.state for event in twin.listed(job.events())][-1] == "done"
    assert {event.state for event in twin.listed(job.progress())} == {"queued", "running"}
    assert job.state == "done"
    first = twin.do(job.result())
    assert twin.do(job.result()) is first


def test_arrays_and_images_travel_both_ways(twin: Twin, start_peer: Callable[..., Peer]) -> None:
    noise = np.arange(6, dtype=np.float16).reshape(2, 3)

    def echo(caller: Caller, request: Submit) -> None:
        outcome = Outcome(outputs={"latents": request.arguments["latents"]}, seeds=[1])
        caller.reply(request, info_of(request))
        end = Finished(job=request.job, state="done", outcome=outcome)
        caller.send(end, noise.tobytes())

    client = twin.client(start_peer(submit=echo).endpoint)
    picture = Image.new("RGB", (4, 4))
    result = twin.do(client.generate("shapes", "x", latents=noise, image=picture))
    assert np.array_equal(result.outputs["latents"], noise)
    with pytest.raises(InvalidRequest, match="latents"):
        _ = result.image


def test_an_argument_that_cannot_be_sent_is_refused_before_it_leaves(
    twin: Twin, peer: Peer
) -> None:
    client = twin.client(peer.endpoint)
    with pytest.raises(InvalidRequest, match="function"):
        twin.do(client.generate("shapes", "x", callback=lambda: None))
    with pytest.raises(TooLarge):
        twin.do(client.generate("shapes", "x" * 100_000))
    for seed in (-1, 1 << 63, 1 << 70):
        with pytest.raises(InvalidRequest, match=f"the seed is {seed}") as caught:
            twin.do(client.generate("shapes", "x", seed=seed))
        assert str((1 << 63) - 1) in caught.value.hint
    assert peer.count("submit") == 0


def test_a_request_over_the_announced_body_limit_is_refused_before_it_leaves(
    twin: Twin, peer: Peer
) -> None:
    with pytest.raises(TooLarge, match="limit"):
        twin.do(twin.client(peer.endpoint).generate("shapes", "x", numbers=[1.5] * 200_000))
    assert peer.count("submit") == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("model_load_failed", ModelLoadFailed),
        ("id_conflict", IdConflict),
        ("a_code_of_the_future", OffloadError),
    ],
)
def test_a_refusal_is_raised_by_its_code(
    twin: Twin, start_peer: Callable[..., Peer], code: str, kind: type[OffloadError]
) -> None:
    client = twin.client(start_peer(submit=refusing(code, path="/p")).endpoint)
    with pytest.raises(kind) as caught:
        twin.do(client.generate("shapes", "x"))
    assert caught.value.details == {"path": "/p"}


def test_a_job_that_fails_raises_its_error_each_time(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    def fail(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request))
        info = ErrorInfo(code="out_of_memory", message="8 GiB are needed")
        caller.send(Finished(job=request.job, state="failed", error=info))

    peer = start_peer(submit=fail)
    job = twin.do(twin.client(peer.endpoint).submit("shapes", "x"))
    for _ in range(2):
        with pytest.raises(OffloadError, match="8 GiB"):
            twin.do(job.result())
    assert job.state == "failed"
    wait_for(lambda: peer.count("taken") == 1)


def test_a_cancelled_job_says_so(twin: Twin, start_peer: Callable[..., Peer]) -> None:
    hold = lambda caller, request: caller.reply(request, info_of(request, "running"))  # noqa: E731
    job = twin.do(twin.client(start_peer(submit=hold).endpoint).submit("shapes", "x"))
    assert job.state == "running"
    assert twin.do(job.cancel()) == "cancelled"
    with pytest.raises(Cancelled):
        twin.do(job.result())
    assert twin.do(job.cancel()) == "cancelled"


def test_an_earlier_job_is_found_by_its_id(twin: Twin, start_peer: Callable[..., Peer]) -> None:
    def fetch(caller: Caller, request: Any) -> None:
        caller.reply(request, info_of(request, "done"))
        caller.send(*finished(request.job))

    peer = start_peer(fetch=fetch)
    client = twin.client(peer.endpoint)
    job = twin.do(client.job("of-yesterday"))
    assert twin.do(job.result()).seed == 7
    assert twin.do(client.job("of-yesterday")).state == "done"
    assert peer.count("fetch") == 1, "what is known here is not asked again"


def test_an_unknown_job_is_an_error_at_once(twin: Twin, start_peer: Callable[..., Peer]) -> None:
    client = twin.client(start_peer(fetch=refusing("unknown_job")).endpoint)
    with pytest.raises(UnknownJob):
        twin.do(client.job("never"))


def test_questions_give_typed_rows_and_skip_fields_of_the_future(twin: Twin, peer: Peer) -> None:
    client = twin.client(peer.endpoint)
    assert [model.name for model in twin.do(client.models())] == ["shapes"]
    assert [job.state for job in twin.do(client.jobs())] == ["running"]
    assert twin.do(client.stats()) == {}
    assert 0 < twin.do(client.ping()) < 5
    assert twin.do(client.cancel("a")) == "cancelled"
    assert twin.do(client.unload("shapes")) is None


def test_load_sends_options_and_makes_paths_absolute(
    twin: Twin, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    client = twin.client(peer.endpoint)
    twin.do(client.load("m", "model", dtype="float16"))
    twin.do(client.load("m", "./missing"))
    twin.do(client.load("m", "owner/name"))
    twin.do(client.load("m"))
    loads = [request for request in peer.heard if type(request).__name__ == "Load"]
    assert [load.source for load in loads] == [
        str(tmp_path / "model"),
        str(tmp_path / "missing"),
        "owner/name",
        None,
    ]
    assert loads[0].options == {"dtype": "float16"}


def test_load_makes_the_paths_of_a_single_file_absolute(
    twin: Twin, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    client = twin.client(peer.endpoint)
    components = {"vae": {"source": "./vae.safetensors"}, "unet": "none"}
    twin.do(client.load("m", "./m.safetensors", config=Path("config"), components=components))
    twin.do(client.load("m", "./m.safetensors", config="owner/name"))
    loads = [request for request in peer.heard if type(request).__name__ == "Load"]
    assert loads[0].options == {
        "config": str(tmp_path / "config"),
        "components": {"vae": {"source": str(tmp_path / "vae.safetensors")}, "unet": "none"},
    }
    assert loads[1].options == {"config": "owner/name"}


@pytest.mark.parametrize("source", ["x" * 300, "/" + "x" * 300, "~nobody-of-that-name/model"])
def test_load_sends_a_source_that_cannot_be_looked_up_as_it_is(
    twin: Twin, peer: Peer, source: str
) -> None:
    client = twin.client(peer.endpoint)
    twin.do(client.load("m", source))
    (load,) = [request for request in peer.heard if type(request).__name__ == "Load"]
    assert load.source.endswith(source)


def test_an_empty_source_and_a_time_limit_that_is_no_number_are_refused(
    twin: Twin, peer: Peer
) -> None:
    client = twin.client(peer.endpoint)
    with pytest.raises(InvalidRequest, match="source is empty"):
        twin.do(client.load("m", ""))
    with pytest.raises(InvalidRequest, match="timeout_s is nan"):
        twin.do(client.generate("shapes", "x", timeout_s=float("nan")))


def test_busy_is_waited_out(twin: Twin, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer()

    def busy_once(caller: Caller, request: Submit) -> None:
        peer.answers.clear()
        caller.refuse(request, "busy", retry_after_s=0.1)

    peer.answers["submit"] = busy_once
    assert twin.do(twin.client(peer.endpoint).generate("shapes", "x")).seed == 7
    assert peer.count("submit") == 2


def test_busy_is_raised_where_it_shall_not_be_waited_out(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer(submit=refusing("busy", retry_after_s=30.0))
    with pytest.raises(Busy):
        twin.do(twin.client(peer.endpoint, retry_busy=False).generate("shapes", "x"))
    started = time.monotonic()
    with pytest.raises(Busy):
        twin.do(twin.client(peer.endpoint).generate("shapes", "x", timeout_s=1))
    assert time.monotonic() - started < 1
    assert peer.count("submit") == 2


def test_a_silent_daemon_times_out_and_the_sentence_says_so(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    client = twin.client(start_peer(stats=ignore).endpoint)
    started = time.monotonic()
    with pytest.raises(TimedOut, match=r"answer to stats .* 300 ms"):
        twin.do(client.stats(timeout_s=0.3))
    assert 0.3 <= time.monotonic() - started < 2
    twin.do(client.ping())


def test_generate_that_times_out_cancels_its_job(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    hold = lambda caller, request: caller.reply(request, info_of(request, "running"))  # noqa: E731
    peer = start_peer(submit=hold)
    client = twin.client(peer.endpoint, timeout_s=0.3)
    with pytest.raises(TimedOut):
        twin.do(client.generate("shapes", "x"))
    wait_for(lambda: peer.count("cancel") == 1)
    assert peer.heard[-1].job == next(r.job for r in peer.heard if isinstance(r, Submit))


def test_a_result_that_is_waited_for_too_short_can_be_had_later(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    held: list[tuple[Caller, str]] = []

    def hold(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request, "running"))
        held.append((caller, request.job))

    peer = start_peer(submit=hold, ping=lambda caller, _: caller.send(*finished(held[0][1])))
    client = twin.client(peer.endpoint)
    job = twin.do(client.submit("shapes", "x"))
    with pytest.raises(TimedOut):
        twin.do(job.result(timeout_s=0.1))
    assert peer.count("cancel") == 0
    with pytest.raises(TimedOut):
        twin.do(client.ping(timeout_s=0.2))
    assert twin.do(job.result()).seed == 7


def test_an_error_in_on_progress_cancels_the_job_and_comes_out(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    def steps(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request))
        caller.send(ProgressMessage(job=request.job, state="running", step=1, steps=9))

    def enough(progress: Progress) -> None:
        if progress.step:
            raise RuntimeError("enough")

    peer = start_peer(submit=steps)
    with pytest.raises(RuntimeError, match="enough"):
        twin.do(twin.client(peer.endpoint).generate("shapes", "x", on_progress=enough))
    wait_for(lambda: peer.count("cancel") == 1)


def test_an_answer_that_cannot_be_read_is_an_error_of_the_request(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    client = twin.client(start_peer(stats=lambda caller, _: caller.send_raw(b"\xc1")).endpoint)
    with pytest.raises(ProtocolMismatch, match="cannot be read"):
        twin.do(client.stats())
    twin.do(client.ping())


def test_rows_that_are_missing_are_an_error(twin: Twin, start_peer: Callable[..., Peer]) -> None:
    client = twin.client(start_peer(jobs=lambda caller, r: caller.reply(r, {})).endpoint)
    with pytest.raises(InvalidRequest, match="jobs"):
        twin.do(client.jobs())


def test_an_image_that_does_not_fit_its_frame_is_an_error(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    def short(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request))
        end, frame = finished(request.job)
        caller.send(end, frame[:-1])

    with pytest.raises(InvalidRequest, match="frame of 6 bytes"):
        twin.do(twin.client(start_peer(submit=short).endpoint).generate("shapes", "x"))


def test_case_38_another_protocol_version_is_said_at_once(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    refuse = refusing("protocol_mismatch", client=1, daemon=99)
    client = twin.client(start_peer(hello=refuse).endpoint)
    started = time.monotonic()
    with pytest.raises(ProtocolMismatch):
        twin.do(client.stats())
    assert time.monotonic() - started < 1
    with pytest.raises(ProtocolMismatch):
        twin.do(client.connect())


def test_a_hello_that_is_never_answered_is_unreachable_within_the_connect_timeout(
    twin: Twin, start_peer: Callable[..., Peer]
) -> None:
    client = twin.client(start_peer(hello=ignore).endpoint, connect_timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(Unreachable, match="does not answer on it"):
        twin.do(client.generate("shapes", "x"))
    assert 0.5 <= time.monotonic() - started < 2


def test_no_socket_is_unreachable_at_once(twin: Twin, socket_path: Path) -> None:
    client = twin.client(f"ipc://{socket_path}")
    started = time.monotonic()
    with pytest.raises(Unreachable, match=rf"{socket_path}: there is no such socket"):
        twin.do(client.stats())
    assert time.monotonic() - started < 1


def test_a_client_that_found_no_daemon_finds_it_later(
    twin: Twin, socket_path: Path, start_peer: Callable[..., Peer]
) -> None:
    client = twin.client(f"ipc://{socket_path}")
    with pytest.raises(Unreachable):
        twin.do(client.ping())
    start_peer()
    assert math.isfinite(twin.do(client.ping()))


def test_a_closed_client_says_so_and_can_be_closed_again(twin: Twin, peer: Peer) -> None:
    client = twin.client(peer.endpoint)
    twin.do(client.ping())
    assert not client.closed
    twin.do(client.close())
    twin.do(client.close())
    assert client.closed
    for call in (client.ping, client.stats, client.connect, client.jobs):
        with pytest.raises(InvalidRequest, match="closed"):
            twin.do(call())


def test_an_endpoint_that_is_none_is_refused(twin: Twin) -> None:
    with pytest.raises(InvalidRequest, match="not an endpoint"):
        twin.do(twin.client("http://x").ping())
