"""What the journal says of jobs and models when a daemon starts; removes files no row names."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import msgspec

from offload_protocol.errors import StorageFailed
from offload_protocol.messages import Submit
from offload_protocol.records import JobState
from offloadd.channel.specs import ModelSpec
from offloadd.control.journal.frames import NO_LENGTHS, FrameFile, split, unpack_lengths

_READ = (
    "SELECT number, user, job, client, program, request, digest, size_bytes, seed, submitted_at,"
    " strikes, kills, is_alone, request_lengths, request_frames, state, ended_at, body,"
    " result_lengths, result_frames FROM jobs ORDER BY number"
)


class Accepted(msgspec.Struct, frozen=True):
    """A job as it was accepted; `submitted_at` is in seconds since the epoch."""

    number: int
    user: str
    client: str
    program: str
    request: Submit
    digest: bytes
    size_bytes: int
    seed: int
    submitted_at: float
    strikes: int = 0
    kills: int = 0
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that had not ended; `frames` are its request's, or why they cannot be read."""

    accepted: Accepted
    frames: tuple[memoryview, ...] | StorageFailed


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that had ended; without `body`, its result was taken."""

    accepted: Accepted
    state: JobState
    ended_at: float
    body: bytes | None
    frames: tuple[memoryview, ...] = ()
    file: FrameFile | None = None


@dataclass(frozen=True, slots=True)
class Recovered:
    """All that the journal holds, oldest first."""

    open: tuple[OpenJob, ...] = ()
    ended: tuple[EndedJob, ...] = ()
    models: tuple[ModelSpec, ...] = ()
    pins: tuple[str, ...] = ()


def read_journal(connection: sqlite3.Connection, directory: Path) -> tuple[Recovered, int]:
    """All that is there, and the last number that was used; `directory` holds the files of frames.

    Raises `sqlite3.Error`, `OSError`, and `msgspec.MsgspecError` for what cannot be read.
    """
    open_jobs: list[OpenJob] = []
    ended: list[EndedJob] = []
    last_number = 0
    named: set[Path] = set()
    for row in connection.execute(_READ):
        accepted = Accepted(
            *(row[0], row[1], row[3], row[4]),
            msgspec.msgpack.decode(row[5], type=Submit),
            *(row[6], row[7], row[8], row[9], row[10], row[11], bool(row[12])),
        )
        last_number = accepted.number
        state = row[15]
        if state == "open":
            file = FrameFile(directory / f"{row[0]}.request", unpack_lengths(row[13]))
            open_jobs.append(OpenJob(accepted, _frames(row[14], file)))
            named.add(file.path)
            continue
        file = FrameFile(directory / f"{row[0]}.result", unpack_lengths(row[18] or NO_LENGTHS))
        is_inline = row[19] is not None or not file.size_bytes
        frames = split(memoryview(row[19] or b""), file.lengths) if is_inline else ()
        one = EndedJob(
            accepted,
            state,
            *(row[16], row[17], frames, None if is_inline else file),
        )
        ended.append(one)
        named.add(file.path)
    for path in directory.iterdir():
        # Left behind where a process died between a file and its row.
        if path not in named:
            path.unlink()
    models = [
        msgspec.msgpack.decode(spec, type=ModelSpec)
        for (spec,) in connection.execute("SELECT spec FROM models ORDER BY name")
    ]
    pins = tuple(name for (name,) in connection.execute("SELECT name FROM pins"))
    return Recovered(tuple(open_jobs), tuple(ended), tuple(models), pins), last_number


def _frames(inline: bytes | None, file: FrameFile) -> tuple[memoryview, ...] | StorageFailed:
    if inline is not None:
        return split(memoryview(inline), file.lengths)
    try:
        return file.read()
    except StorageFailed as error:
        return error
