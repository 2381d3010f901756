"""`offloadctl` as a user starts it: what it prints, and its exit status for each end."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client.peer import Caller, Peer, finished, ignore, info_of
from PIL import Image

from offload_protocol.codec import plain
from offload_protocol.messages import Finished, Progress, Submit
from offload_protocol.records import ErrorInfo, Outcome

Start = Callable[..., Peer]
DRAW = ("generate", "shapes", "--prompt", "a red dot")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the scripted peer with the answers given."""
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory(prefix="offload-") as directory:

        def begin(**answers: Any) -> Peer:
            peer = Peer(f"ipc://{directory}/s.sock")
            peer.answers.update(answers)
            peer.start()
            peers.append(peer)
            return peer

        yield begin
        for peer in peers:
            peer.stop()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "offloadctl", *words]


def environment(endpoint: str | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    return {**kept, "OFFLOADD_ENDPOINT": endpoint or "ipc:///nowhere/s.sock"}


def ctl(
    endpoint: str | None, *words: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*words), capture_output=True, timeout=60, env=environment(endpoint), cwd=cwd
    )


def refusing(code: str) -> Callable[[Caller, Any], None]:
    return lambda caller, request: caller.refuse(request, code, "this is why")


def hold(caller: Caller, request: Submit) -> None:
    caller.reply(request, info_of(request, "running"))
    caller.send(Progress(job=request.job, state="running", step=1, steps=9))


def test_generate_writes_the_picture(start: Start, tmp_path: Path) -> None:
    peer = start()
    words = ("--seed", "7", "--steps", "4", "--size", "8x16", "--arg", "guidance_scale=2.5")
    done = ctl(peer.endpoint, *DRAW, *words, "-o", "red.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "red.png") as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)
    assert done.stdout == b""
    assert b"red.png" in done.stderr
    submit = next(request for request in peer.heard if isinstance(request, Submit))
    assert submit.seed == 7
    assert submit.arguments == {
        "prompt": "a red dot",
        "num_inference_steps": 4,
        "width": 8,
        "height": 16,
        "guidance_scale": 2.5,
    }


def test_generate_replaces_a_file_and_writes_what_the_suffix_says(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "red.jpg").write_bytes(b"old")
    done = ctl(start().endpoint, *DRAW, "-o", str(tmp_path / "red.jpg"))
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "red.jpg") as image:
        assert image.format == "JPEG"


def test_generate_writes_png_to_standard_output(start: Start) -> None:
    done = ctl(start().endpoint, *DRAW, "-o", "-")
    assert done.returncode == 0, done.stderr
    assert Image.open(io.BytesIO(done.stdout)).format == "PNG"


def test_several_pictures_get_numbers_and_json_names_them(start: Start, tmp_path: Path) -> None:
    def two(caller: Caller, request: Submit) -> None:
        images = [{"$image": n, "mode": "L", "size": [1, 1]} for n in (0, 1)]
        outcome = Outcome(outputs={"images": images}, seeds=[7, 8])
        end = Finished(job=request.job, state="done", outcome=outcome)
        caller.reply(request, info_of(request))
        caller.send(end, b"\x01", b"\x02")

    done = ctl(start(submit=two).endpoint, "--json", *DRAW, "-o", str(tmp_path / "a.png"))
    data = json.loads(done.stdout)
    assert data["files"] == [str(tmp_path / "a-1.png"), str(tmp_path / "a-2.png")]
    assert (data["seeds"], data["model"]) == ([7, 8], "shapes")
    assert set(data) >= {"job", "timings", "peak_device_bytes", "moved_bytes"}
    with Image.open(tmp_path / "a-2.png") as image:
        assert image.getpixel((0, 0)) == 2


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("missing/a.png", "no directory"),
        ("a.xyz", "suffix"),
        ("a", "suffix"),
        ("dir.png", "is a directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_said_before_the_job_runs(
    start: Start, tmp_path: Path, output: str, words: str
) -> None:
    (tmp_path / "dir.png").mkdir()
    peer = start()
    done = ctl(peer.endpoint, *DRAW, "-o", output, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert peer.heard == []


def test_a_file_that_fails_to_be_written_after_the_job_is_a_failure(
    start: Start, tmp_path: Path
) -> None:
    target = tmp_path / "full.png"
    target.symlink_to("/dev/full")
    done = ctl(start().endpoint, "--json", *DRAW, "-o", str(target))
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "storage_failed"


def test_stats_are_one_json_object(start: Start) -> None:
    answer = {"daemon": {"version": "1"}, "future": [1]}
    peer = start(stats=lambda caller, request: caller.reply(request, answer))
    for words in (("--json", "stats"), ("stats", "--json")):
        done = ctl(peer.endpoint, *words)
        assert (done.returncode, json.loads(done.stdout)) == (0, answer)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("stats",), "KEY"),
        (("ps",), "shapes"),
        (("jobs",), "1/3"),
        (("models",), "shapes"),
        (("load", "m", "/models/m"), "/models/m"),
        (("unload", "m"), "unloaded m"),
        (("pin", "m"), "pinned m"),
        (("unpin", "m"), "unpinned m"),
        (("drain",), "no job is left"),
        (("cancel", "j"), "j cancelled"),
    ],
)
def test_each_command_shows_its_answer_and_as_json(
    start: Start, words: tuple[str, ...], shown: str
) -> None:
    peer = start()
    done = ctl(peer.endpoint, *words)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout.decode()
    assert b"\x1b" not in done.stdout, "no colours in a pipe"
    as_json = ctl(peer.endpoint, *words, "--json")
    assert isinstance(json.loads(as_json.stdout), dict)


def test_a_detached_job_is_queued_and_fetched_later(start: Start, tmp_path: Path) -> None:
    peer = start()
    done = ctl(peer.endpoint, *DRAW, "--detached", "--keep-alive", "5m")
    assert done.returncode == 0, done.stderr
    submit = next(request for request in peer.heard if isinstance(request, Submit))
    assert (submit.detached, submit.keep_alive_s) == (True, 300.0)
    job = done.stdout.decode().strip()
    assert job == submit.job
    assert peer.count("cancel") == 0

    def ended(caller: Caller, request: Any) -> None:
        caller.reply(request, info_of(request, "done"))
        caller.send(*finished(request.job))

    peer.answers["fetch"] = ended
    fetched = ctl(peer.endpoint, "fetch", job, "-o", str(tmp_path / "red.png"))
    assert fetched.returncode == 0, fetched.stderr
    with Image.open(tmp_path / "red.png") as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*DRAW,), "say where to write the picture"),
        ((*DRAW, "--detached", "-o", "a.png"), "a detached job writes no file"),
        ((*DRAW, "-o", "a.png", "--keep-alive", "soon"), "--keep-alive"),
        (("fetch", "j"), "say where to write the picture"),
    ],
)
def test_wrong_words_about_a_job_are_said_before_it_runs(
    start: Start, words: tuple[str, ...], says: str
) -> None:
    peer = start()
    done = ctl(peer.endpoint, *words)
    assert done.returncode == 2
    # The box around an error breaks lines.
    assert says.split()[-1] in done.stderr.decode()
    assert peer.heard == []


def test_forever_keeps_a_model(start: Start, tmp_path: Path) -> None:
    peer = start()
    ctl(peer.endpoint, *DRAW, "-o", str(tmp_path / "a.png"), "--keep-alive", "forever")
    (submit,) = (request for request in peer.heard if isinstance(request, Submit))
    assert submit.keep_alive_s == -1.0


def test_a_job_over_its_timeout_is_told_of_the_option(start: Start, tmp_path: Path) -> None:
    peer = start(submit=hold)
    done = ctl(peer.endpoint, *DRAW, "-o", str(tmp_path / "a.png"), "--timeout", "0.3s")
    assert done.returncode == 1
    assert b"--timeout" in done.stderr or b"stopped or overloaded" in done.stderr
    assert b"timeout_s" not in done.stderr


def test_a_job_that_runs_is_said_to_be_stopping(start: Start) -> None:
    running = start(
        cancel=lambda caller, request: caller.reply(request, info_of(request, "running"))
    )
    assert ctl(running.endpoint, "cancel", "j").stdout == b"j is being stopped\n"


def test_load_sends_its_options_and_an_absolute_path(start: Start, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    peer = start()
    settings = ("--set", "dtype=float16", "--set", "components.vae.offload=none")
    done = ctl(peer.endpoint, "load", "m", "here", "--offload", "group", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    load = peer.heard[-1]
    assert load.source == str(tmp_path / "here")
    assert load.options == {
        "offload": "group",
        "dtype": "float16",
        "components": {"vae": {"offload": "none"}},
    }


def test_exit_1_when_the_daemon_refuses(start: Start) -> None:
    peer = start(models=refusing("unauthorized"))
    done = ctl(peer.endpoint, "models")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"offloadctl: this is why\n"
    as_json = ctl(peer.endpoint, "--json", "models")
    assert as_json.returncode == 1
    error = json.loads(as_json.stdout)["error"]
    assert error == {"code": "unauthorized", "message": "this is why", "hint": "", "details": {}}


def test_exit_1_when_the_job_fails(start: Start, tmp_path: Path) -> None:
    def fail(caller: Caller, request: Submit) -> None:
        info = ErrorInfo(code="out_of_memory", message="too big", hint="draw smaller")
        caller.reply(request, info_of(request))
        caller.send(Finished(job=request.job, state="failed", error=info))

    done = ctl(start(submit=fail).endpoint, *DRAW, "-o", str(tmp_path / "a.png"))
    assert done.returncode == 1
    assert b"too big" in done.stderr
    assert b"draw smaller" in done.stderr


def test_exit_1_when_the_time_is_over(start: Start, tmp_path: Path) -> None:
    peer = start(submit=hold)
    words = ("--json", *DRAW, "--timeout", "300ms", "-o", str(tmp_path / "a.png"))
    done = ctl(peer.endpoint, *words)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "timeout"


@pytest.mark.parametrize(
    "words",
    [
        ("no-such-command",),
        ("stats", "--no-such-option"),
        ("cancel",),
        ("generate", "shapes", "--prompt", "x"),
        (*DRAW, "-o", "a.png", "--size", "8"),
        (*DRAW, "-o", "a.png", "--seed", "seven"),
        (*DRAW, "-o", "a.png", "--arg", "no-equals-sign"),
        (*DRAW, "-o", "a.png", "--arg", "seed=1"),
        (*DRAW, "-o", "a.png", "--arg", "a=1", "--arg", "a=2"),
        (*DRAW, "-o", "a.png", "--steps", "3", "--arg", "num_inference_steps=4"),
        (*DRAW, "-o", "a.png", "--timeout", "soon"),
        ("load", "m", "s", "--set", "source=x"),
        ("--endpoint", "http://x", "stats"),
    ],
)
def test_exit_2_for_wrong_usage(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = ctl(None, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"Error" in done.stderr
    as_json = ctl(None, *words, "--json", cwd=tmp_path)
    assert as_json.returncode == 2
    assert json.loads(as_json.stdout)["error"]["code"] == "invalid_request"


def test_exit_2_for_json_and_the_picture_on_one_output() -> None:
    assert ctl(None, "--json", *DRAW, "-o", "-").returncode == 2


def test_exit_3_when_there_is_no_daemon(start: Start) -> None:
    started = time.monotonic()
    done = ctl(None, "stats")
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"ipc:///nowhere/s.sock: there is no such socket" in done.stderr
    assert time.monotonic() - started < 20
    as_json = ctl(None, "--json", "stats")
    assert as_json.returncode == 3
    assert json.loads(as_json.stdout)["error"]["code"] == "unreachable"
    assert ctl(start(hello=ignore).endpoint, "stats").returncode == 3


def test_the_endpoint_option_goes_before_the_environment(start: Start) -> None:
    endpoint = start().endpoint
    assert ctl(None, "--endpoint", endpoint, "models").returncode == 0
    assert ctl(None, "models", "--endpoint", endpoint).returncode == 0


def test_an_interrupt_cancels_the_job_and_exits_130(start: Start, tmp_path: Path) -> None:
    peer = start(submit=hold)
    child = subprocess.Popen(
        command(*DRAW, "-o", str(tmp_path / "a.png")),
        env=environment(peer.endpoint),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 20
    while peer.count("submit") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=30)
    assert (child.returncode, out) == (130, b"")
    assert b"Traceback" not in errors
    assert peer.count("cancel") == 1
    assert not (tmp_path / "a.png").exists()


def test_version_and_help() -> None:
    done = ctl(None, "--version")
    assert (done.returncode, done.stdout) == (0, b"offloadctl 0.1.0\n")
    for words in (("--help",), ("generate", "--help"), ("load", "--help")):
        done = ctl(None, *words)
        assert done.returncode == 0
        assert b"Usage: offloadctl" in done.stdout


def test_help_loads_neither_the_client_nor_rich() -> None:
    code = (
        "import sys\nfrom offloadctl.__main__ import run\nrun(['--help'])\n"
        "print(sorted({'zmq', 'msgspec', 'rich', 'offload_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_a_reader_that_has_enough_is_no_error(start: Start) -> None:
    line = f"{sys.executable} -m offloadctl models | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, env=environment(start().endpoint), timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_terminal_gets_a_progress_bar_and_no_picture(start: Start, tmp_path: Path) -> None:
    def slowly(caller: Caller, request: Submit) -> None:
        hold(caller, request)
        time.sleep(0.5)
        caller.send(*finished(request.job))

    peer = start(submit=slowly)
    seen = in_terminal(peer.endpoint, *DRAW, "-o", str(tmp_path / "a.png"))
    assert "1/9" in seen
    assert (tmp_path / "a.png").exists()
    assert "will not write a picture to a terminal" in in_terminal(peer.endpoint, *DRAW, "-o", "-")


def test_a_terminal_gets_tables(start: Start) -> None:
    row = info_of(Submit(rid=0, job="[red]j", model="[bold]m"), "running", step=2, steps=4)
    peer = start(jobs=lambda caller, request: caller.reply(request, {"jobs": [plain(row)]}))
    seen = in_terminal(peer.endpoint, "jobs")
    assert "[red]j" in seen, "what clients say is not taken for markup"
    assert "─" in seen


def in_terminal(endpoint: str, *words: str) -> str:
    """What a command shows on a terminal."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        command(*words),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment(endpoint), "TERM": "xterm", "COLUMNS": "120"},
        close_fds=True,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:
            break
    os.close(ours)
    child.wait(30)
    return seen.decode()


def test_a_mode_and_its_parameters_may_be_given_apart(start: Start) -> None:
    peer = start()
    words = ("load", "m", "--offload", "group", "--set", "offload.offload_type=leaf_level")
    assert ctl(peer.endpoint, *words).returncode == 0
    assert peer.heard[-1].options == {"offload": {"mode": "group", "offload_type": "leaf_level"}}
    twice = ctl(peer.endpoint, *words, "--set", "offload.mode=none")
    assert twice.returncode == 2
    assert b"the mode is given twice" in twice.stderr


@pytest.mark.parametrize("words", [("stats",), ("--json", "stats"), (*DRAW, "-o", "-")])
def test_an_output_that_is_full_is_a_failure_in_one_sentence(
    start: Start, words: tuple[str, ...]
) -> None:
    endpoint = start().endpoint
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(
            command(*words),
            env=environment(endpoint),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_closed_streams_want_no_words(start: Start) -> None:
    endpoint = start().endpoint
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        line = f"{sys.executable} -m offloadctl stats {closed}"
        done = subprocess.run(
            ["bash", "-c", line], env=environment(endpoint), capture_output=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_bad_endpoint_is_told_by_where_it_came_from() -> None:
    assert b"OFFLOADD_ENDPOINT: 'nonsense'" in ctl("nonsense", "stats").stderr
    assert b"--endpoint: 'nonsense'" in ctl(None, "--endpoint", "nonsense", "stats").stderr
