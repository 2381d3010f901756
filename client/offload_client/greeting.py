"""How a client introduces itself, on each new connection in the same words."""

from __future__ import annotations

from dataclasses import dataclass

from offload_protocol.messages import PROTOCOL_VERSION, Hello


@dataclass(frozen=True, slots=True)
class Introduction:
    """Who speaks: `session` is random and lasts as long as the client."""

    session: str
    program: str
    client_version: str

    def hello(self, rid: int) -> Hello:
        """The first message of a connection."""
        return Hello(
            rid=rid,
            version=PROTOCOL_VERSION,
            session=self.session,
            program=self.program,
            client_version=self.client_version,
        )
