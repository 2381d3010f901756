"""Decides where the journal is written: what is small on the event loop, what may take long beside.

A small transaction costs the loop about 15 us, as it only reaches the page cache; by way of a
thread it costs twice that and, since both want the interpreter, a job's round trip 150 us. What may
take 50 to 200 ms goes to a thread, for the loop must not stand still: frames in files, a full sync,
a checkpoint of the log, and everything for a while after a write that a slow disk has held up.

While the thread works, the connection is its own, and what comes meanwhile waits for it: order is
kept, and a burst costs few transactions.
"""

from __future__ import annotations

import logging
import math
import queue
import resource
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offloadd.control.journal.database import Sync
from offloadd.control.journal.transactions import Entry, Tellings, Transactions

LATER_S = 0.05
"""How long what nobody waits for does so for company; a transaction costs as much as its rows."""

SLOW_S, SLOW_PERIOD_S = 0.01, 10.0
"""A write on the loop that took so long sends those of the next period to the thread."""

CHECKPOINT_ENTRIES = 2000
"""Entries between two checkpoints: the log stays below some megabytes."""

_log = logging.getLogger(__name__)


class Loop(Protocol):
    """What is needed of an event loop; asyncio's has it."""

    def call_soon(self, call: Callable[..., object], *args: Any) -> object:
        """Call from the loop, after what it does now."""

    def call_soon_threadsafe(self, call: Callable[..., object], *args: Any) -> object:
        """The same from any thread."""

    def call_later(self, delay: float, call: Callable[..., object], *args: Any) -> object:
        """The same after so many seconds."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the thread is to write, and whether to checkpoint afterwards."""

    entries: Sequence[Entry]
    checkpoint: bool


class Writer:
    """Owns the connection; every method is called from the loop."""

    def __init__(self, connection: sqlite3.Connection, path: Path, sync: Sync, loop: Loop) -> None:
        self._transactions = Transactions(connection, path, durable=sync == "full")
        self._is_sync_slow = sync == "full"
        self._loop = loop
        self._waiting: list[Entry] = []
        self._later: list[Entry] = []
        self._gathers = self._is_urgent = self._flushes_soon = False
        self._due_s = self._later_due_s = self._wakes_s = math.inf
        self._since_checkpoint = 0
        self._slow_until_s = 0.0
        self._is_thread_busy = False
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Write an entry soon; never waits for the disk longer than `SLOW_S`, or once."""
        self._waiting.append(entry)
        if entry.patience_s:
            self._due_s = min(self._due_s, time.perf_counter() + entry.patience_s)
            self._set_timer()
        elif self._gathers:
            self._is_urgent = True
        elif not self._flushes_soon:
            self._flushes_soon = True
            self._loop.call_soon(self.flush)

    def put_now(self, entry: Entry) -> None:
        """Write an entry, and what waits, before this returns, unless that may take long."""
        self._waiting.append(entry)
        self.flush()

    def put_later(self, entry: Entry) -> None:
        """Write an entry that nobody waits for: with others of its kind, and in nobody's way."""
        self._later.append(entry)
        if self._later_due_s == math.inf:
            self._later_due_s = time.perf_counter() + LATER_S
            self._set_timer()

    def hurry(self) -> None:
        """Write what was put for later before what is put from now on."""
        self._waiting += self._later
        self._later, self._later_due_s = [], math.inf

    def take_back(self, entry: Entry) -> bool:
        """Write an entry not at all; False where that comes too late."""
        if entry not in self._waiting:
            return False
        self._waiting.remove(entry)
        return True

    def gather(self) -> None:
        """Several entries may come at once: write them together, at the next `commit`."""
        self._gathers = True

    def commit(self) -> None:
        """No more come at once: write what may not wait."""
        self._gathers = False
        if self._is_urgent:
            self.flush()

    def close(self) -> None:
        """Write what waits, then close the database."""
        self.hurry()
        self._batches.put(Batch(self._taken(), checkpoint=True))
        self._batches.put(None)
        self._thread.join()

    def flush(self) -> None:
        """Write what waits without waiting for the loop's next turn."""
        self._flushes_soon = self._is_urgent = False
        self._due_s = math.inf
        if not self._waiting or self._is_thread_busy:
            # Who is told that the thread is done looks for what waits.
            return
        batch = self._taken()
        self._since_checkpoint += len(batch)
        if self._may_take_long(batch):
            self._hand_over(batch)
        else:
            start_s, waits = time.perf_counter(), _waits()
            tellings = self._transactions.write(batch)
            end_s = time.perf_counter()
            if end_s - start_s > SLOW_S and _waits() > waits:
                self._slow_until_s = end_s + SLOW_PERIOD_S
            _tell(tellings)

    def _set_timer(self) -> None:
        """See to it that what waits is written in its time.

        There is one timer for all; one that is too early is left to find that out.
        """
        due_s = min(self._due_s, self._later_due_s)
        if due_s < self._wakes_s:
            self._wakes_s = due_s
            self._loop.call_later(max(due_s - time.perf_counter(), 0.0), self._wake, due_s)

    def _wake(self, due_s: float) -> None:
        if due_s != self._wakes_s:
            # Another timer was set since, for an earlier time.
            return
        self._wakes_s = math.inf
        if not self._is_thread_busy:
            self._flush_what_is_due()
            self._set_timer()

    def _flush_what_is_due(self) -> None:
        now_s = time.perf_counter()
        if self._later_due_s <= now_s:
            self.hurry()
            self.flush()
        elif self._due_s <= now_s:
            self.flush()

    def _may_take_long(self, batch: Sequence[Entry]) -> bool:
        return (
            self._is_sync_slow
            or self._transactions.owes
            or self._since_checkpoint >= CHECKPOINT_ENTRIES
            or any(entry.file is not None or entry.stale_files for entry in batch)
            or (self._slow_until_s > 0.0 and time.perf_counter() < self._slow_until_s)
        )

    def _hand_over(self, batch: Sequence[Entry]) -> None:
        self._is_thread_busy = True
        is_due = self._since_checkpoint >= CHECKPOINT_ENTRIES
        if is_due:
            self._since_checkpoint = 0
        self._batches.put(Batch(batch, checkpoint=is_due))

    def _taken(self) -> Sequence[Entry]:
        batch, self._waiting = self._waiting, []
        return batch

    def _thread_is_done(self) -> None:
        self._is_thread_busy = False
        self._flush_what_is_due()
        self.flush()
        self._set_timer()

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            self._say(_tell, self._transactions.write(batch.entries))
            if batch.checkpoint:
                self._transactions.checkpoint()
            self._say(self._thread_is_done)
        self._transactions.close()

    def _say(self, call: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            # The loop has ended, and with it everybody who would want to know.
            _log.debug("written after the end")


def _waits() -> int:
    """How often this thread has waited for something.

    Tells a disk that holds a write up from other programs that hold the processor.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _tell(tellings: Tellings) -> None:
    for call, error in tellings:
        call(error)
