"""The journal: what was written is read again, whatever happens to processes, disk and file."""

from __future__ import annotations

import os
import queue
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from offload_protocol import codec
from offload_protocol.errors import StorageFailed
from offload_protocol.messages import Finished, Submit
from offload_protocol.records import JobState, Outcome
from offloadd.channel.specs import ModelSpec
from offloadd.control.journal import writer
from offloadd.control.journal.database import SCHEMA_VERSION, Sync
from offloadd.control.journal.frames import INLINE_BYTES, FrameFile
from offloadd.control.journal.journal import DATABASE, FRAMES, Journal
from offloadd.control.journal.reading import Accepted, Recovered

BODY = codec.encode(Finished(job="a", state="done", outcome=Outcome(outputs={}, seeds=[1])))


class ManualLoop:
    """Calls when it is let; time passes at once."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        self.calls.put(lambda: call(*args))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        self.calls.put(lambda: call(*args))

    def run_one(self) -> None:
        self.calls.get(timeout=20)()


class Opened:
    """A journal and what it said, told in this thread."""

    def __init__(self, directory: Path, sync: Sync = "normal") -> None:
        self.loop = ManualLoop()
        self.journal, self.recovered = Journal.open(directory, sync, self.loop)

    def told(self, write: Callable[[Callable[[StorageFailed | None], None]], object]) -> object:
        """What a write is told when it is done."""
        answers: list[StorageFailed | None] = []
        write(answers.append)
        while not answers:
            self.loop.run_one()
        return answers[0]

    def accept(self, job: str, *frames: bytes) -> int:
        """Write a job and give its number; raises what the journal says."""
        number = self.journal.new_number()
        one = accepted(number, job)
        error = self.told(lambda told: self.journal.accept(one, frames, told))
        if isinstance(error, StorageFailed):
            raise error
        return number

    def end(
        self, number: int, *frames: bytes, job: str = "a", state: JobState = "done"
    ) -> FrameFile | None:
        """Write how a job ended; raises what the journal says."""
        files: list[FrameFile | None] = []
        request = Submit(rid=1, job=job, model="m")
        error = self.told(
            lambda told: files.append(
                self.journal.end(number, request, state, 2000.0, BODY, frames, told)
            )
        )
        if isinstance(error, StorageFailed):
            raise error
        return files[0]


def accepted(number: int, job: str) -> Accepted:
    return Accepted(
        number=number,
        user="7",
        client="7:session",
        program="prog",
        request=Submit(rid=1, job=job, model="m", arguments={"prompt": "x"}, priority=3),
        digest=b"digest",
        size_bytes=11,
        seed=(1 << 63) - 1,
        submitted_at=1000.5,
    )


def reopened(directory: Path) -> Recovered:
    one = Opened(directory)
    one.journal.close()
    return one.recovered


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    one = Opened(tmp_path)
    yield one
    one.journal.close()


@pytest.mark.parametrize("size", [0, 10, INLINE_BYTES, INLINE_BYTES + 1, 3_000_000])
def test_an_accepted_job_is_read_again_as_it_was(tmp_path: Path, size: int) -> None:
    one = Opened(tmp_path)
    frames = (os.urandom(size), b"", b"tail")
    number = one.accept("a", *frames)
    one.journal.note_deaths(number, 1, 3, is_alone=True)
    one.journal.close()
    (job,) = reopened(tmp_path).open
    assert job.accepted == msgspec.structs.replace(
        accepted(number, "a"), strikes=1, kills=3, is_alone=True
    )
    assert not isinstance(job.frames, StorageFailed)
    assert tuple(map(bytes, job.frames)) == frames


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_an_end_is_read_again_until_it_is_taken(tmp_path: Path, size: int) -> None:
    one = Opened(tmp_path)
    number = one.accept("a", bytes(100_000))
    frames = (os.urandom(size), b"tail")
    one.end(number, *frames)
    one.journal.close()
    (job,) = reopened(tmp_path).ended
    assert (job.state, job.ended_at, job.body) == ("done", 2000.0, BODY)
    read = job.frames if job.file is None else job.file.read()
    assert tuple(map(bytes, read)) == frames
    assert job.accepted.request.arguments == {}
    assert not (tmp_path / FRAMES / f"{number}.request").exists()

    two = Opened(tmp_path)
    assert two.told(lambda told: two.journal.taken(number, 3000.0, told)) is None
    two.journal.close()
    (job,) = reopened(tmp_path).ended
    assert (job.state, job.body) == ("done", None)
    assert list((tmp_path / FRAMES).iterdir()) == []


def accept_patiently(
    one: Opened, job: str, patience_s: float, *frames: bytes
) -> tuple[int, list[StorageFailed | None]]:
    """Write a job that may wait for its end; gives its number, and what is said of it so far."""
    number, said = one.journal.new_number(), list[StorageFailed | None]()
    one.journal.accept(accepted(number, job), frames, said.append, patience_s=patience_s)
    return number, said


def test_an_acceptance_that_waits_is_one_row_with_its_end_and_told_before_it(
    tmp_path: Path,
) -> None:
    one = Opened(tmp_path)
    number, said = accept_patiently(one, "a", 60.0)
    assert said == []
    ends: list[int] = []
    request = Submit(rid=1, job="a", model="m")
    one.journal.end(
        *(number, request, "done", 2000.0, BODY, (b"tail",)), lambda _: ends.append(len(said))
    )
    assert (said, ends) == ([None], [1])
    one.journal.close()
    (job,) = reopened(tmp_path).ended
    assert (job.state, job.body, tuple(map(bytes, job.frames))) == ("done", BODY, (b"tail",))
    assert job.accepted.request == msgspec.structs.replace(request, rid=1)
    assert job.accepted.seed == accepted(number, "a").seed


def test_an_acceptance_waits_no_longer_than_it_may(opened: Opened) -> None:
    _, said = accept_patiently(opened, "a", 0.001)
    while not said:
        opened.loop.run_one()
    _, large = accept_patiently(opened, "b", 60.0, bytes(INLINE_BYTES + 1))
    while not large:
        opened.loop.run_one()
    assert said == large == [None]


def test_an_acceptance_that_waits_goes_with_whatever_is_written(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    first, said = accept_patiently(one, "a", 60.0)
    one.journal.note_deaths(first, 1, 0, is_alone=False)
    one.accept("b")
    assert said == [None]
    one.end(first)
    accept_patiently(one, "c", 60.0)
    one.journal.close()
    recovered = reopened(tmp_path)
    assert [job.accepted.request.job for job in recovered.open] == ["b", "c"]
    assert [job.accepted.strikes for job in recovered.ended] == [1]


def test_an_id_that_is_forgotten_may_be_used_at_once(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    number = one.accept("a")
    one.end(number)
    one.journal.taken(number, 3000.0, None)
    one.journal.forget(number, "7", "a")
    again = one.accept("a")
    one.journal.close()
    (job,) = reopened(tmp_path).open
    assert job.accepted.number == again


def test_what_nobody_waits_for_is_in_nobodys_way(opened: Opened) -> None:
    first = opened.accept("a")
    opened.end(first)
    told: list[StorageFailed | None] = []
    opened.journal.taken(first, 3000.0, told.append)
    opened.accept("b")
    assert told == []
    while not told:
        opened.loop.run_one()
    assert told == [None]


@pytest.mark.parametrize(("waits", "is_slow"), [((5, 5), False), ((5, 6), True)])
def test_only_a_write_that_waited_itself_shows_a_slow_disk(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, waits: tuple[int, int], is_slow: bool
) -> None:
    monkeypatch.setattr(writer, "SLOW_S", -1.0)
    monkeypatch.setattr(writer, "_waits", iter(waits).__next__)
    opened.accept("a")
    assert (opened.journal._writer._slow_until_s > 0) == is_slow


def test_numbers_are_not_used_again(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    first = one.accept("a")
    one.journal.close()
    two = Opened(tmp_path)
    assert two.accept("b") > first
    two.journal.close()


def test_a_job_ends_once(opened: Opened) -> None:
    number = opened.accept("a")
    opened.end(number, state="cancelled")
    opened.end(number, state="done")
    opened.journal.close()
    rows = list(
        sqlite3.connect(opened.journal._frames.parent / DATABASE).execute("SELECT state FROM jobs")
    )
    assert rows == [("cancelled",)]


def test_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    number = one.accept("a", bytes(100_000))
    one.end(number, bytes(100_000))
    one.journal.forget(number, "7", "a")
    one.journal.close()
    assert reopened(tmp_path) == Recovered()
    assert list((tmp_path / FRAMES).iterdir()) == []


def test_models_that_came_by_load_are_remembered(tmp_path: Path) -> None:
    spec = ModelSpec(name="added", source="/somewhere", keep_alive=5.0)
    one = Opened(tmp_path)
    one.journal.host_model(spec)
    one.journal.host_model(ModelSpec(name="gone", source="/x"))
    one.journal.forget_model("gone")
    one.journal.close()
    assert reopened(tmp_path).models == (spec,)


def test_nobody_else_can_read_what_was_asked(tmp_path: Path) -> None:
    (tmp_path / DATABASE).touch(mode=0o644)
    one = Opened(tmp_path)
    one.accept("a", bytes(100_000))
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    one.journal.close()
    assert modes.pop(FRAMES) == 0o700
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("content", [b"no database at all, but long enough" * 40, None])
def test_a_damaged_journal_is_refused_with_the_command_that_moves_it_away(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / DATABASE
    if content is None:
        one = Opened(tmp_path)
        for number in range(200):
            one.accept(f"job{number}", bytes(1000))
        one.journal.close()
        data = bytearray(path.read_bytes())
        data[4096 * 2 : 4096 * 6] = os.urandom(4096 * 4)
        path.write_bytes(data)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(StorageFailed, match="is damaged") as caught:
        Opened(tmp_path)
    assert f"mv {path}" in caught.value.hint
    assert path.read_bytes() == before


def test_a_journal_of_a_newer_daemon_is_left_alone(tmp_path: Path) -> None:
    Opened(tmp_path).journal.close()
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(StorageFailed, match=f"has version {SCHEMA_VERSION + 1}"):
        Opened(tmp_path)


HOLDER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from control.test_journal import Opened
one = Opened(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
one.journal.close()
"""


def test_two_daemons_cannot_share_a_journal(tmp_path: Path) -> None:
    # Of another process, since a process that closes a file lets go of all its own locks on it.
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StorageFailed, match=f"process {holder.pid}, uses the") as caught:
            Opened(tmp_path)
        assert caught.value.details["pid"] == holder.pid
        holder.communicate()
    Opened(tmp_path).journal.close()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="cannot write the journal"):
        Opened(tmp_path / "missing")


def test_a_request_whose_file_is_gone_says_so(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    number = one.accept("a", bytes(100_000))
    one.journal.close()
    file = tmp_path / FRAMES / f"{number}.request"
    file.write_bytes(bytes(10))
    (job,) = reopened(tmp_path).open
    assert isinstance(job.frames, StorageFailed)
    assert "has 10 bytes instead of 100000" in job.frames.message


def test_files_that_no_row_names_are_removed(tmp_path: Path) -> None:
    Opened(tmp_path).journal.close()
    for name in ("9.result", "9.request.part"):
        (tmp_path / FRAMES / name).write_bytes(b"x")
    reopened(tmp_path)
    assert list((tmp_path / FRAMES).iterdir()) == []


FULL_DISK = """
import sys, resource, signal
from pathlib import Path
from typing import Any
sys.path[:0] = sys.argv[2:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from control.test_journal import Opened
from offload_protocol.errors import StorageFailed
one = Opened(Path(sys.argv[1]))
kept = one.accept("kept", bytes(1000))
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
refused = 0
for job, size in (("large", 1_000_000), ("small", 10), ("huge", 1_000_000)):
    try:
        one.accept(job, bytes(size))
    except StorageFailed as error:
        assert "cannot be written" in error.message, error
        refused += 1
assert refused == 2, refused
try:
    one.end(kept, bytes(2_000_000), job="kept")
except StorageFailed:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
else:
    sys.exit("a full disk took two megabytes")
one.accept("later")
one.journal.close()
"""


def test_a_full_disk_refuses_what_is_too_large_and_keeps_the_rest(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), *sys.path], check=True, timeout=60
    )
    recovered = reopened(tmp_path)
    assert [one.accepted.request.job for one in recovered.open] == ["small", "later"]
    # The end that did not fit was owed, and written as soon as it could be.
    (ended,) = recovered.ended
    assert ended.accepted.request.job == "kept"
    assert ended.file is not None
    assert ended.file.read()[0] == bytes(2_000_000)


WRITER = """
import sys
from pathlib import Path
from typing import Any
sys.path[:0] = sys.argv[3:]
from control.test_journal import Opened
one = Opened(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 10**9):
    row = one.accept(f"job{number}", bytes(40_000 if number % 5 == 0 else 100))
    print("accepted", number, flush=True)
    if number % 2:
        one.end(row, bytes(40_000 if number % 3 == 0 else 100), job=f"job{number}")
        print("ended", number, flush=True)
"""


def test_a_killed_process_loses_nothing_that_it_said_was_written(tmp_path: Path) -> None:
    source = random.Random(5)
    said: dict[str, set[str]] = {"accepted": set(), "ended": set()}
    for start in range(0, 6000, 1000):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(start), *sys.path],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        time.sleep(source.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        process.wait()
        process.stdout.close()
        for word, number in (line.split() for line in lines if len(line.split()) == 2):
            said[word].add(f"job{number}")
        recovered = reopened(tmp_path)
        ended = {one.accepted.request.job for one in recovered.ended}
        known = ended | {one.accepted.request.job for one in recovered.open}
        assert said["accepted"] <= known
        assert said["ended"] <= ended
        for one in recovered.ended:
            assert one.file is None or one.file.read()
        for waiting in recovered.open:
            assert not isinstance(waiting.frames, StorageFailed)
    assert len(said["accepted"]) > 6


def test_full_sync_writes_the_same(tmp_path: Path) -> None:
    one = Opened(tmp_path, "full")
    one.end(one.accept("a", bytes(100_000)), bytes(100_000))
    one.journal.close()
    assert len(reopened(tmp_path).ended) == 1


def test_a_journal_of_version_1_is_taken_over_with_its_jobs_and_models(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    one.end(one.accept("ended", b"frame"), b"result", job="ended")
    one.accept("open")
    one.journal.host_model(ModelSpec(name="m", source="/m"))
    one.journal.close()
    as_version_1(tmp_path / DATABASE)
    recovered = reopened(tmp_path)
    (ended,) = recovered.ended
    assert (ended.accepted.user, ended.accepted.request.job) == ("7", "ended")
    assert [bytes(frame) for frame in ended.frames] == [b"result"]
    assert [waiting.accepted.user for waiting in recovered.open] == ["7"]
    assert [spec.name for spec in recovered.models] == ["m"]
    assert reopened(tmp_path) == recovered


WITHOUT_DEATHS = "ALTER TABLE jobs DROP COLUMN kills; ALTER TABLE jobs DROP COLUMN is_alone;"


def as_version_1(path: Path) -> None:
    """Make a journal what the first version wrote: users were numbers."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(WITHOUT_DEATHS)
        (schema,) = connection.execute(
            "SELECT sql FROM sqlite_schema WHERE name = 'jobs'"
        ).fetchone()
        columns = schema.replace("user TEXT", "uid INTEGER").replace("(user, job)", "(uid, job)")
        connection.executescript(
            f"ALTER TABLE jobs RENAME TO new_jobs; {columns};"
            "INSERT INTO jobs SELECT * FROM new_jobs; DROP TABLE new_jobs; DROP TABLE pins;"
            "PRAGMA user_version = 1;"
        )


def test_a_journal_of_version_2_is_taken_over_and_holds_pins_from_then_on(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    one.accept("open")
    one.journal.close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.executescript(f"{WITHOUT_DEATHS} DROP TABLE pins; PRAGMA user_version = 2;")
    again = Opened(tmp_path)
    again.journal.pin_model("m", True)
    again.journal.pin_model("n", True)
    again.journal.pin_model("n", False)
    again.journal.close()
    recovered = reopened(tmp_path)
    assert recovered.pins == ("m",)
    assert len(recovered.open) == 1


def test_a_journal_of_version_3_is_taken_over_and_counts_kills_from_then_on(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    number = one.accept("open")
    one.journal.close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.executescript(f"{WITHOUT_DEATHS} PRAGMA user_version = 3;")
    again = Opened(tmp_path)
    assert [waiting.accepted.kills for waiting in again.recovered.open] == [0]
    again.journal.note_deaths(number, 0, 2, is_alone=False)
    again.journal.close()
    assert [waiting.accepted.kills for waiting in reopened(tmp_path).open] == [2]


def test_a_journal_of_version_4_is_taken_over_and_knows_from_then_on_who_is_to_be_alone(
    tmp_path: Path,
) -> None:
    one = Opened(tmp_path)
    number = one.accept("open")
    one.journal.close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.executescript("ALTER TABLE jobs DROP COLUMN is_alone; PRAGMA user_version = 4;")
    again = Opened(tmp_path)
    assert [waiting.accepted.is_alone for waiting in again.recovered.open] == [False]
    again.journal.note_deaths(number, 0, 1, is_alone=True)
    again.journal.close()
    assert [waiting.accepted.is_alone for waiting in reopened(tmp_path).open] == [True]
