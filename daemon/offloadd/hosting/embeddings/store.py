"""What encoders gave for earlier requests, in host memory: bounded, the coldest goes first.

Promises: never more than `limit_bytes`, and at once less when that shrinks; what is handed out is
never written to again. It knows nothing of torch, since the limit comes before torch is imported.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from offloadd.channel.messages import EmbeddingFigures

ENTRY_BYTES = 2048
"""What an entry takes beside its tensors, so that small ones are bounded too."""


class Blob(Protocol):
    """A tensor in host memory."""

    @property
    def nbytes(self) -> int: ...


class Key(NamedTuple):
    """One call of one loaded encoder; the digest holds everything else that its answer follows."""

    encoder: int
    digest: bytes


@dataclass(slots=True, eq=False)
class Entry:
    """An answer: its form, and those of its tensors that somebody has read, by number."""

    form: Any
    blobs: dict[int, Any] = field(default_factory=dict)
    size_bytes: int = ENTRY_BYTES


class EmbeddingStore:
    """One for each worker; any thread may use it."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self._mutex = threading.Lock()
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._size_bytes = 0
        self._hits = self._misses = self._evicted = 0

    @property
    def is_on(self) -> bool:
        """Whether anything can be kept now."""
        return self._limit_bytes > ENTRY_BYTES

    def set_limit(self, limit_bytes: int) -> None:
        """Keep no more than this from now on."""
        with self._mutex:
            self._limit_bytes = limit_bytes
            self._make_room()

    def find(self, key: Key) -> Entry | None:
        """The answer that was kept, which counts as used now; whoever gets it counts as a hit."""
        with self._mutex:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                self._hits += 1
            return entry

    def begin(self, key: Key, form: Any) -> Entry:
        """An encoder has computed an answer of this form, of which nothing is kept yet.

        Where another job was faster, it is that job's entry.
        """
        with self._mutex:
            self._misses += 1
            entry = self._entries.get(key)
            if entry is None or entry.form != form:
                self._remove(key)
                entry = self._entries[key] = Entry(form)
                self._size_bytes += entry.size_bytes
                self._make_room()
            return entry

    def add(self, key: Key, entry: Entry, number: int, blob: Blob) -> None:
        """Keep one more tensor of an answer; an answer that alone is too large goes entirely."""
        with self._mutex:
            if self._entries.get(key) is not entry or number in entry.blobs:
                return
            if entry.size_bytes + blob.nbytes > self._limit_bytes:
                self._evicted += 1
                self._remove(key)
                return
            # A new map: who reads the one before has what was there then.
            entry.blobs = {**entry.blobs, number: blob}
            entry.size_bytes += blob.nbytes
            self._size_bytes += blob.nbytes
            self._entries.move_to_end(key)
            self._make_room()

    def discard(self, key: Key) -> None:
        """Keep nothing of this answer."""
        with self._mutex:
            self._remove(key)

    def drop(self, encoder: int) -> None:
        """Keep nothing of this encoder."""
        with self._mutex:
            for key in [key for key in self._entries if key.encoder == encoder]:
                self._remove(key)

    def figures(self) -> EmbeddingFigures:
        """Totals of all owners together."""
        with self._mutex:
            return EmbeddingFigures(
                entries=len(self._entries),
                size_bytes=self._size_bytes,
                hits=self._hits,
                misses=self._misses,
                evicted=self._evicted,
            )

    def _make_room(self) -> None:
        while self._entries and self._size_bytes > self._limit_bytes:
            self._remove(next(iter(self._entries)))
            self._evicted += 1

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size_bytes -= entry.size_bytes
