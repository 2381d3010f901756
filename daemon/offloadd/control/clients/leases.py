"""Which clients are still there: a lease for each that has gone, and what time makes of it.

Pure; the transport says who comes and goes. A client whose machine stands still is dropped by the
transport's heartbeat `RETURN_S` before its lease ends, so that here both look the same.
"""

from __future__ import annotations

RETURN_S = 2.0
"""How long a client whose connection ended may take to come back."""


class Leases:
    """Clients that are away, and until when they are waited for."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def came(self, client: str) -> None:
        """A client is there."""
        self._until_s.pop(client, None)

    def left(self, client: str, now_s: float) -> None:
        """A client's connection has ended."""
        self._until_s[client] = now_s + RETURN_S

    def renew(self, client: str, until_s: float) -> None:
        """Wait for a client whom an earlier daemon knew."""
        self._until_s[client] = until_s

    def expired(self, now_s: float) -> list[str]:
        """The clients that did not come back; they are named once."""
        gone = [client for client, until_s in self._until_s.items() if until_s <= now_s]
        for client in gone:
            del self._until_s[client]
        return gone
