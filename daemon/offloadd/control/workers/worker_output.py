"""What a worker writes to its standard streams: into the log line by line, the last ones kept."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque

MAX_LINE_BYTES = 2_000
"""A longer line is cut, so that a worker that writes without end costs nothing."""

KEPT_LINES = 20

_LINE_END = re.compile(rb"[\r\n]+")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_log = logging.getLogger("offloadd.worker")


class WorkerOutput:
    """Follows one worker's output."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def last_line(self) -> str:
        """The last line that says something: continuation lines are indented."""
        told = [line for line in self._last if not line[0].isspace()]
        return told[-1] if told else ""

    async def follow(self, stream: asyncio.StreamReader | None) -> None:
        """Read until the stream ends."""
        if stream is None:
            return
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = _LINE_END.split(rest + chunk)
            rest = rest[:MAX_LINE_BYTES]
            for line in lines:
                self._take(line)
        self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
        if not text:
            return
        self._last.append(text)
        level, _, message = text.partition(" ")
        if level in _LEVELS:
            _log.log(logging.getLevelName(level), "%s", message)
        else:
            _log.info("worker[%d] %s", self._pid, text)
