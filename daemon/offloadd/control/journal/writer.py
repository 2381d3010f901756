"""The thread that writes the journal: all that waits goes into one transaction (group commit).

A thread, and not the event loop: a commit costs about 12 us on the loop and 27 us by way of the
thread, but a checkpoint, a full sync or a slow disk takes 50 to 200 ms, for which the loop must
not stand still. While one transaction is written, the next one gathers, so a burst costs few. The
thread is woken when the loop has done what else it had to do at once: both need the interpreter,
and an order that has to wait for the thread costs a job more than the journal does.

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
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload_protocol.errors import StorageFailed
from offloadd.control.journal.database import Sync, storage_failed
from offloadd.control.journal.frames import Frame, FrameFile

MAX_OWED = 10_000

PATIENCE_S = 0.05
"""How long an entry that may wait does so for company; a transaction costs as much as its rows."""

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function on the event loop after so many seconds; to be used on the loop alone."""

Told = Callable[[StorageFailed | None], None]
Statement = tuple[str, tuple[object, ...]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing to write; `told` is called on the loop when it is written, or with why not."""

    statement: Statement
    told: Told | None = None
    file: FrameFile | None = None
    frames: Sequence[Frame] = ()
    stale_files: tuple[Path, ...] = ()
    is_owed: bool = False
    may_wait: bool = False
    """Nobody waits for it, and no harm is done where a kill comes first."""


def at_once(delay_s: float, call: Callable[[], None]) -> None:
    """The `Later` of one who has nothing else to do."""
    call()


class Writer:
    """Owns the connection. `call_soon` hands a function to the event loop, from any thread."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        sync: Sync,
        call_soon: Callable[[Callable[[], None]], object],
        later: Later = at_once,
    ) -> None:
        self._connection = connection
        self._path = path
        self._durable = sync == "full"
        self._call_soon = call_soon
        self._later = later
        self._wakes_soon = self._wakes_sometime = False
        self._waiting: list[Entry] = []
        self._owed: deque[Entry] = deque(maxlen=MAX_OWED)
        self._changed = threading.Condition()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Write an entry soon; never blocks on the disk."""
        with self._changed:
            self._waiting.append(entry)
        if entry.may_wait and not (self._wakes_soon or self._wakes_sometime):
            self._wakes_sometime = True
            self._later(PATIENCE_S, self._wake)
        elif not entry.may_wait and not self._wakes_soon:
            self._wakes_soon = True
            self._later(0.0, self._wake)

    def _wake(self) -> None:
        self._wakes_soon = self._wakes_sometime = False
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, then close the database."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                batch, self._waiting = self._waiting, []
                is_last = not batch and self._closing
            if batch or self._owed:
                self._tell(self._write([*self._owed, *batch], len(self._owed)))
            if is_last:
                break
        self._connection.close()

    def _write(self, batch: list[Entry], owed: int) -> list[tuple[Told, StorageFailed | None]]:
        self._owed.clear()
        error = self._transaction(batch)
        errors: list[StorageFailed | None] = [error] * len(batch)
        if error is not None:
            errors = [self._transaction([entry]) for entry in batch]
        for entry, failure in zip(batch, errors, strict=True):
            if failure is not None and entry.is_owed:
                self._owed.append(entry)
        self._note(next((one for one in errors if one is not None), None))
        # What was owed has been told already.
        told = list(zip(batch, errors, strict=True))[owed:]
        return [(entry.told, failure) for entry, failure in told if entry.told is not None]

    def _transaction(self, entries: list[Entry]) -> StorageFailed | None:
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

    def _execute(self, entries: list[Entry]) -> None:
        if len(entries) == 1:
            # A statement by itself is a transaction, with a third of the calls.
            self._connection.execute(*entries[0].statement)
            return
        self._connection.execute("BEGIN IMMEDIATE")
        for entry in entries:
            self._connection.execute(*entry.statement)
        self._connection.execute("COMMIT")

    def _roll_back(self, entries: list[Entry]) -> None:
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

    def _tell(self, told: list[tuple[Told, StorageFailed | None]]) -> None:
        def tell() -> None:
            for call, error in told:
                call(error)

        if told:
            try:
                self._call_soon(tell)
            except RuntimeError:
                # The loop has ended, and with it everybody who would want to know.
                _log.debug("written after the end")
