"""What the control plane writes down about jobs and models, and reads again at its next start.

A job is accepted when its row is written: request, seed, owner. Its end is written before anybody
is told of it. What a row says is enough to run the job again with the same numbers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from offload_protocol import codec
from offload_protocol.errors import StorageFailed
from offload_protocol.messages import Submit
from offload_protocol.records import JobState
from offloadd.channel.specs import ModelSpec
from offloadd.control.journal.database import Sync, open_database, storage_failed
from offloadd.control.journal.frames import (
    INLINE_BYTES,
    NO_LENGTHS,
    Frame,
    FrameFile,
    lengths_of,
    pack_lengths,
)
from offloadd.control.journal.reading import Accepted, Recovered, read_journal
from offloadd.control.journal.transactions import Entry, Statement, Told
from offloadd.control.journal.writer import Loop, Writer

DATABASE = "journal.db"
FRAMES = "frames"

_ACCEPT = (
    "INSERT INTO jobs (number, user, job, client, program, request, digest, size_bytes, seed,"
    " submitted_at, request_lengths, request_frames) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_ACCEPT_AND_END = (
    "INSERT INTO jobs (number, user, job, client, program, request, digest, size_bytes, seed,"
    " submitted_at, request_lengths, state, ended_at, body, result_lengths, result_frames)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_DEATHS = "UPDATE jobs SET strikes = ?, kills = ?, is_alone = ? WHERE number = ?"
_END = (
    "UPDATE jobs SET state = ?, ended_at = ?, request = ?, request_lengths = ?,"
    " request_frames = NULL, body = ?, result_lengths = ?, result_frames = ?"
    " WHERE number = ? AND state = 'open'"
)
_REPLACE = (
    "UPDATE jobs SET body = ?, result_lengths = ?, result_frames = NULL"
    " WHERE number = ? AND state <> 'open' AND taken = 0"
)
_TAKEN = (
    # Where the end itself is still owed, this says that there was one.
    "UPDATE jobs SET state = iif(state = 'open', 'done', state), taken = 1, request_frames = NULL,"
    " body = NULL, result_lengths = NULL, result_frames = NULL,"
    " ended_at = coalesce(ended_at, ?) WHERE number = ?"
)
_FORGET = "DELETE FROM jobs WHERE number = ?"
_HOST = "INSERT OR REPLACE INTO models (name, spec) VALUES (?, ?)"
_FORGET_MODEL = "DELETE FROM models WHERE name = ?"
_PIN = "INSERT OR REPLACE INTO pins (name) VALUES (?)"
_UNPIN = "DELETE FROM pins WHERE name = ?"


class Journal:
    """The journal of one daemon, in its state directory."""

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, writer: Writer, last_number: int
    ) -> None:
        self._frames = directory / FRAMES
        self._file_names = {path.name for path in self._frames.iterdir()}
        self._connection = connection
        self._writer = writer
        self._last_number = last_number
        self._patient: dict[int, Entry] = {}
        """Acceptances that wait for the ends of their jobs."""
        self._forgotten: set[tuple[str, str]] = set()
        """Users and ids of jobs whose rows are still to be removed."""

    @classmethod
    def open(
        cls,
        directory: Path,
        sync: Sync,
        loop: Loop,
    ) -> tuple[Journal, Recovered]:
        """Open or make the journal, and read it; raises `StorageFailed`."""
        path = directory / DATABASE
        connection = open_database(path, sync)
        try:
            (directory / FRAMES).mkdir(mode=0o700, exist_ok=True)
            recovered, last_number = read_journal(connection, directory / FRAMES)
        except (sqlite3.Error, OSError) as error:
            connection.close()
            raise storage_failed(error, path) from error
        except msgspec.MsgspecError as error:
            connection.close()
            raise StorageFailed(
                f"the journal {path} holds what this daemon cannot read: {error}",
                hint=f"move it away, its jobs are then forgotten: mv {path} {path}.damaged",
                details={"path": str(path)},
            ) from error
        writer = Writer(connection, path, sync, loop)
        return cls(directory, connection, writer, last_number), recovered

    def new_number(self) -> int:
        """The number of the next job; numbers grow and are not used again."""
        self._last_number += 1
        return self._last_number

    def accept(
        self, job: Accepted, frames: Sequence[Frame], told: Told, patience_s: float = 0.0
    ) -> None:
        """Write a new job; it is accepted when `told` is called without an error.

        With `patience_s` it may wait so long for its own end, to be written with it as one row.
        """
        lengths = lengths_of(frames)
        inline, file = self._place(job.number, "request", frames, lengths)
        row = (
            *(job.number, job.user, job.request.job, job.client, job.program),
            *(codec.encode(job.request), job.digest, job.size_bytes, job.seed, job.submitted_at),
            *(pack_lengths(lengths) if lengths else NO_LENGTHS, inline),
        )
        if (job.user, job.request.job) in self._forgotten:
            self._writer.hurry()
        patience_s = 0.0 if file else patience_s
        if patience_s:
            told = _first(lambda: self._patient.pop(job.number, None), told)
        entry = Entry((_ACCEPT, row), told, file, frames if file else (), patience_s=patience_s)
        if patience_s:
            self._patient[job.number] = entry
        self._writer.put(entry)

    def note_deaths(self, number: int, strikes: int, kills: int, *, is_alone: bool) -> None:
        """Write how often a worker died of a job, and how often only beside it."""
        self._writer.put(Entry((_DEATHS, (strikes, kills, is_alone, number))))

    def end(
        self,
        number: int,
        request: Submit,
        state: JobState,
        ended_at: float,
        body: bytes,
        frames: Sequence[Frame],
        told: Told,
    ) -> FrameFile | None:
        """Write how a job ended, now; gives the file where its frames are, if they get one.

        `request` is what is kept of it. Where it cannot be written now, `told` says so, and it is
        tried again later. Without a file, `told` may be called before this returns.
        """
        lengths = lengths_of(frames)
        inline, file = self._place(number, "result", frames, lengths)
        packed = pack_lengths(lengths) if lengths else NO_LENGTHS
        kept, large = codec.encode(request), frames if file else ()
        accepted = self._patient.pop(number, None)
        if accepted is not None and self._writer.take_back(accepted):
            _, row = accepted.statement
            row = (*row[:5], kept, *row[6:10], NO_LENGTHS, state, ended_at, body, packed, inline)
            entry = Entry((_ACCEPT_AND_END, row), _both(accepted.told, told), file, large)
        else:
            row = (state, ended_at, kept, NO_LENGTHS, body, packed, inline, number)
            stale = self._stale(number, "request")
            entry = Entry((_END, row), told, file, large, stale, is_owed=True)
        self._writer.put_now(entry)
        return file

    def replace_result(self, number: int, body: bytes) -> None:
        """Put a result without frames in place of one that gave way."""
        self._forget_by((_REPLACE, (body, NO_LENGTHS, number)), number)

    def taken(self, number: int, now: float, told: Told | None) -> None:
        """Write that a job's result was taken: only its id is remembered."""
        self._forget_by((_TAKEN, (now, number)), number, told)

    def forget(self, number: int, user: str, job: str) -> None:
        """Remember nothing of a job, so that its id may be used again."""
        self._forgotten.add((user, job))
        told = _first(lambda: self._forgotten.discard((user, job)))
        self._forget_by((_FORGET, (number,)), number, told)

    def host_model(self, spec: ModelSpec) -> None:
        """Write down a model that came by `load`."""
        spec_bytes = msgspec.msgpack.encode(spec)
        self._writer.put(Entry((_HOST, (spec.name, spec_bytes)), is_owed=True))

    def forget_model(self, name: str) -> None:
        """Remember a model no longer."""
        self._writer.put(Entry((_FORGET_MODEL, (name,)), is_owed=True))

    def pin_model(self, name: str, is_pinned: bool) -> None:
        """Write down that a model is pinned, or not any more."""
        self._writer.put(Entry((_PIN if is_pinned else _UNPIN, (name,)), is_owed=True))

    def gather(self) -> None:
        """Several jobs may come at once: accept them together, at the next `commit`."""
        self._writer.gather()

    def commit(self) -> None:
        """No more come at once."""
        self._writer.commit()

    def close(self) -> None:
        """Write what waits, and let go of the journal."""
        self._writer.close()

    def _forget_by(self, statement: Statement, number: int, told: Told | None = None) -> None:
        files = self._stale(number, "request", "result")
        self._writer.put_later(Entry(statement, told, stale_files=files, is_owed=True))

    def _stale(self, number: int, *kinds: str) -> tuple[Path, ...]:
        """The files of a job that are no longer needed; few jobs have any."""
        if not self._file_names:
            return ()
        names = {f"{number}.{kind}" for kind in kinds} & self._file_names
        self._file_names -= names
        return tuple(self._frames / name for name in names)

    def _place(
        self, number: int, kind: str, frames: Sequence[Frame], lengths: tuple[int, ...]
    ) -> tuple[bytes | None, FrameFile | None]:
        if not lengths:
            return b"", None
        if sum(lengths) <= INLINE_BYTES:
            return b"".join(frames), None
        name = f"{number}.{kind}"
        self._file_names.add(name)
        return None, FrameFile(self._frames / name, lengths)


def _both(accepted: Told | None, ended: Told) -> Told:
    def told(error: StorageFailed | None) -> None:
        if accepted is not None:
            accepted(error)
        ended(error)

    return told


def _first(act: Callable[[], object], then: Told | None = None) -> Told:
    def told(error: StorageFailed | None) -> None:
        act()
        if then is not None:
            then(error)

    return told
