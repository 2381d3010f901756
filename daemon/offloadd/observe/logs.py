"""The log on standard error: with times for a person, with priorities for the journal."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping

_PRIORITIES = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}


class _JournalFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # The journal takes each line as an entry of its own.
        text = super().format(record).replace("\n", "\n\t")
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{text}"


class _TimedFormatter(logging.Formatter):
    """Says the hour, which it works out once a second."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._second, self._told = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - its name in the library
        second = int(record.created)
        if second != self._second:
            self._told = time.strftime("%H:%M:%S", time.localtime(second))
            self._second = second
        return self._told


def start_log(level: str, environ: Mapping[str, str]) -> None:
    """Send this process's log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JournalFormatter("%(message)s")
        if _is_journal(environ)
        else _TimedFormatter("%(asctime)s %(levelname)-7s %(message)s")
    )
    # No format of ours names these, and to find them takes as long as the end of a small job.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _is_journal(environ: Mapping[str, str]) -> bool:
    # systemd says which stream it has connected; a redirected one is not the journal's.
    state = os.fstat(sys.stderr.fileno())
    return environ.get("JOURNAL_STREAM") == f"{state.st_dev}:{state.st_ino}"
