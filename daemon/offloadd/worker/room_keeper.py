"""The thread that lets idle models rest when others want the host memory that they compute on.

It waits for the device only between two borders of whoever has the turn. A model that a job is in
the middle of keeps its memory, and the store is told so.
"""

from __future__ import annotations

import logging
import queue
import threading

from offloadd.channel.framing import ChannelClosed
from offloadd.store.arena.client import ArenaClient
from offloadd.worker.models import Models

_log = logging.getLogger(__name__)


class RoomKeeper:
    """One for each worker; begins when it is made."""

    def __init__(self, arena: ArenaClient, models: Models) -> None:
        self._models = models
        self._wanted: queue.SimpleQueue[frozenset[str]] = queue.SimpleQueue()
        arena.tell_wanted(self._wanted.put)
        threading.Thread(target=self._run, name="room-keeper", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._models.let_rest(self._wanted.get())
        except ChannelClosed as reason:
            _log.debug("memory is kept for nobody any more: %s", reason)
