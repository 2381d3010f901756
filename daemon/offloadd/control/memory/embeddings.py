"""Prompt embeddings that the worker keeps, as the control plane accounts for them.

They have what weights leave of the host budget, up to a size that is configured: the worker is told
whenever that changes, before it is told of any memory that weights were given.
"""

from __future__ import annotations

from offloadd.channel.messages import EmbeddingFigures


class Embeddings:
    """The bound and the figures; pure, but for what it remembers."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._told_bytes: int | None = None
        self._now = EmbeddingFigures()
        self._before = EmbeddingFigures()

    @property
    def size_bytes(self) -> int:
        """What they take, as far as is known: never more than was allowed."""
        return min(self._now.size_bytes, self._told_bytes or 0)

    def worker_ready(self) -> None:
        """A new worker keeps nothing, until it is told how much it may."""
        self._told_bytes = 0

    def worker_lost(self) -> None:
        """What it kept has gone with it."""
        self._before, self._now = self._sum(), EmbeddingFigures()
        self._told_bytes = None

    def note(self, figures: EmbeddingFigures) -> None:
        """The worker has said what it keeps."""
        self._now = figures

    def new_limit(self, left_bytes: int) -> int | None:
        """What to tell the worker where weights leave so much; None where it knows already."""
        limit_bytes = max(min(left_bytes, self._most_bytes), 0)
        if self._told_bytes is None or limit_bytes == self._told_bytes:
            return None
        self._told_bytes = limit_bytes
        return limit_bytes

    def figures(self) -> dict[str, int]:
        """The key `embeddings` of the statistics: totals of all clients together."""
        total = self._sum()
        return {
            "limit_bytes": self._told_bytes or 0,
            "size_bytes": self.size_bytes,
            "entries": self._now.entries,
            "hits_total": total.hits,
            "misses_total": total.misses,
            "evicted_total": total.evicted,
        }

    def _sum(self) -> EmbeddingFigures:
        before, now = self._before, self._now
        return EmbeddingFigures(
            hits=before.hits + now.hits,
            misses=before.misses + now.misses,
            evicted=before.evicted + now.evicted,
        )
