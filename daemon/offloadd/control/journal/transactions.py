"""Writes entries into the journal, as many as there are in one transaction (group commit).

Invariants:
- Entries are written in the order in which they were put, and told in that order.
- Files are written before the rows that name them, and removed after the rows that forget them.
- Where a transaction fails, each of its entries is tried alone: one that is too large for a full
  disk does not take the others with it.
- An entry that is owed (how a job ended) is tried again with every later transaction.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from offload_protocol.errors import StorageFailed
from offloadd.control.journal.database import storage_failed
from offloadd.control.journal.frames import Frame, FrameFile

MAX_OWED = 10_000

Told = Callable[[StorageFailed | None], None]
Statement = tuple[str, tuple[object, ...]]
Tellings = list[tuple[Told, StorageFailed | None]]

_log = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True, eq=False):
    """One thing to write; `told` is called on the loop when it is written, or with why not."""

    statement: Statement
    told: Told | None = None
    file: FrameFile | None = None
    frames: Sequence[Frame] = ()
    stale_files: tuple[Path, ...] = ()
    is_owed: bool = False
    patience_s: float = 0.0
    """How long it may wait for company; whoever waits for it is told that much later."""


class Transactions:
    """The connection's only user, of one thread at a time."""

    def __init__(self, connection: sqlite3.Connection, path: Path, durable: bool) -> None:
        self._connection = connection
        self._path = path
        self._durable = durable
        self._owed: deque[Entry] = deque(maxlen=MAX_OWED)
        self._failing = False

    @property
    def owes(self) -> bool:
        """Something could not be written yet."""
        return bool(self._owed)

    def write(self, batch: Sequence[Entry]) -> Tellings:
        """Write entries, and what is owed before them; gives who is to be told what."""
        owed = len(self._owed)
        entries = [*self._owed, *batch]
        self._owed.clear()
        error = self._transaction(entries) if entries else None
        errors: list[StorageFailed | None] = [error] * len(entries)
        if error is not None:
            errors = [self._transaction([entry]) for entry in entries]
        for entry, failure in zip(entries, errors, strict=True):
            if failure is not None and entry.is_owed:
                self._owed.append(entry)
        self._note(next((one for one in errors if one is not None), None))
        # What was owed has been told already.
        told = list(zip(entries, errors, strict=True))[owed:]
        return [(entry.told, failure) for entry, failure in told if entry.told is not None]

    def checkpoint(self) -> None:
        """Bring the log into the database's file, so that it does not grow."""
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            # Nothing is lost: it stays in the log, and the next transaction says what is wrong.
            _log.warning("%s", storage_failed(error, self._path))

    def close(self) -> None:
        """Let go of the database."""
        self._connection.close()

    def _transaction(self, entries: Sequence[Entry]) -> StorageFailed | None:
        try:
            for entry in entries:
                if entry.file is not None:
                    entry.file.write(entry.frames, self._durable)
            self._execute(entries)
        except (sqlite3.Error, OSError) as error:
            self._roll_back(entries)
            return storage_failed(error, self._path)
        for entry in entries:
            for path in entry.stale_files:
                path.unlink(missing_ok=True)
        return None

    def _execute(self, entries: Sequence[Entry]) -> None:
        if len(entries) == 1:
            # A statement by itself is a transaction, with a third of the calls.
            self._connection.execute(*entries[0].statement)
            return
        self._connection.execute("BEGIN IMMEDIATE")
        for entry in entries:
            self._connection.execute(*entry.statement)
        self._connection.execute("COMMIT")

    def _roll_back(self, entries: Sequence[Entry]) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        for entry in entries:
            if entry.file is not None:
                entry.file.path.unlink(missing_ok=True)

    def _note(self, error: StorageFailed | None) -> None:
        if error is not None and not self._failing:
            _log.error("%s", error)
        elif error is None and self._failing:
            _log.info("the journal can be written again")
        self._failing = error is not None
