"""The journal's database file: made, checked and opened, or refused with what to do about it.

It belongs to one daemon at a time: SQLite's exclusive locking holds the file for as long as it is
open, and saves the shared-memory file that WAL would need otherwise.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Literal

from offload_protocol.errors import StorageFailed

Sync = Literal["normal", "full"]

SCHEMA_VERSION = 5

_SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY,
    user TEXT NOT NULL,
    job TEXT NOT NULL,
    client TEXT NOT NULL,
    program TEXT NOT NULL,
    request BLOB NOT NULL,
    digest BLOB NOT NULL,
    size_bytes INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    submitted_at REAL NOT NULL,
    strikes INTEGER NOT NULL DEFAULT 0,
    request_lengths BLOB NOT NULL,
    request_frames BLOB,
    state TEXT NOT NULL DEFAULT 'open',
    taken INTEGER NOT NULL DEFAULT 0,
    ended_at REAL,
    body BLOB,
    result_lengths BLOB,
    result_frames BLOB,
    kills INTEGER NOT NULL DEFAULT 0,
    is_alone INTEGER NOT NULL DEFAULT 0,
    UNIQUE (user, job)
) STRICT;
CREATE TABLE models (name TEXT PRIMARY KEY, spec BLOB NOT NULL) STRICT;
CREATE TABLE pins (name TEXT PRIMARY KEY) STRICT;
"""

# Version 1 knew uids only. A column's type cannot be changed in place.
_FROM_VERSION_1 = f"""
ALTER TABLE jobs RENAME TO old_jobs;
ALTER TABLE models RENAME TO old_models;
{_SCHEMA}
INSERT INTO jobs SELECT number, CAST(uid AS TEXT), job, client, program, request, digest,
    size_bytes, seed, submitted_at, strikes, request_lengths, request_frames, state, taken,
    ended_at, body, result_lengths, result_frames, 0, 0 FROM old_jobs;
INSERT INTO models SELECT * FROM old_models;
DROP TABLE old_jobs;
DROP TABLE old_models;
"""

_FROM_VERSION_4 = "ALTER TABLE jobs ADD COLUMN is_alone INTEGER NOT NULL DEFAULT 0"

_FROM_VERSION_3 = f"ALTER TABLE jobs ADD COLUMN kills INTEGER NOT NULL DEFAULT 0; {_FROM_VERSION_4}"

_FROM_VERSION_2 = f"CREATE TABLE pins (name TEXT PRIMARY KEY) STRICT; {_FROM_VERSION_3}"

_SCRIPTS = {
    0: _SCHEMA,
    1: _FROM_VERSION_1,
    2: _FROM_VERSION_2,
    3: _FROM_VERSION_3,
    4: _FROM_VERSION_4,
}
"""What makes the present version of each earlier one; 0 is an empty file."""


def open_database(path: Path, sync: Sync) -> sqlite3.Connection:
    """Open the journal at `path`, which is made if it is not there, with mode 0600.

    The connection may be handed to another thread. Raises `StorageFailed` where the file is
    damaged, of a newer daemon, in use by another one, or cannot be written.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise StorageFailed(
            f"cannot write the journal {path}: {error.strerror}",
            hint="make room, or give another directory with --state-dir",
            details={"path": str(path)},
        ) from error
    connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path, sync)
    except sqlite3.Error as error:
        connection.close()
        raise storage_failed(error, path) from error
    except StorageFailed:
        connection.close()
        raise
    return connection


def storage_failed(error: sqlite3.Error | OSError, path: Path) -> StorageFailed:
    """What an error of SQLite or of the file system means for whoever runs the daemon."""
    details = {"path": str(path)}
    if isinstance(error, OSError):
        return StorageFailed(
            f"the journal {path} cannot be written: {error.strerror or error}",
            hint="make room on its disk, or repair it",
            details=details,
        )
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        pid = _holder(path)
        holder = "another daemon" if pid is None else f"another daemon, process {pid},"
        return StorageFailed(
            f"{holder} uses the journal {path}",
            hint="stop it first, or give this one another --state-dir",
            details={**details, "pid": pid},
        )
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return _damaged(path, str(error))
    return StorageFailed(
        f"the journal {path} cannot be written: {error}",
        hint="make room on its disk, or repair it",
        details=details,
    )


def _holder(path: Path) -> int | None:
    """The process that holds a lock on the file, where the system tells."""
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for lock in locks:
        # `1: POSIX  ADVISORY  WRITE 1234 fe:00:5678 0 EOF`, and `->` before the kind of a waiter.
        words = lock.split()
        if len(words) >= 6 and words[5].rpartition(":")[2] == str(inode):
            # 0 where it is of another container.
            return int(words[4]) or None
    return None


def _prepare(connection: sqlite3.Connection, path: Path, sync: Sync) -> None:
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {sync.upper()}")
    # The writer says when: a checkpoint waits for the disk.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # Takes the lock now, and not at the first job.
    connection.execute("BEGIN EXCLUSIVE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    script = _SCRIPTS.get(version)
    if script is not None:
        # A script would end the transaction by itself before it begins.
        for statement in script.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")
    if script is None and version != SCHEMA_VERSION:
        raise StorageFailed(
            f"the journal {path} has version {version}, and this daemon writes {SCHEMA_VERSION}",
            hint="start the daemon that wrote it, or move it away: its jobs are then forgotten",
            details={"path": str(path), "version": version},
        )
    faults = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if faults != ["ok"]:
        raise _damaged(path, faults[0])


def _damaged(path: Path, how: str) -> StorageFailed:
    return StorageFailed(
        f"the journal {path} is damaged: {how}",
        hint=f"move it away, its jobs are then forgotten: mv {path} {path}.damaged",
        details={"path": str(path)},
    )
