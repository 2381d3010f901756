"""Previews are dropped first: who does not read at once gets the words alone."""

from __future__ import annotations

from typing import Any

from offload_protocol import codec
from offload_protocol.messages import Hello, Progress
from offloadd.control.clients.peers import LocalPeer
from offloadd.control.clients.router import Sent
from offloadd.control.clients.sessions import Sessions

SHOWN = Progress(
    job="j", state="running", step=1, preview={"$image": 0, "mode": "L", "size": [1, 1]}
)


class Line:
    """A connection that takes messages, or not."""

    def __init__(self) -> None:
        self.peer = LocalPeer(1, 1, 1)
        self.takes = Sent.SENT
        self.sent: list[tuple[bytes, ...]] = []

    def send(self, parts: Any) -> Sent:
        if self.takes is Sent.SENT:
            self.sent.append(tuple(parts))
        return self.takes


def test_a_preview_goes_out_with_its_frame_or_not_at_all() -> None:
    sessions, line = Sessions(lambda key: None), Line()
    connection: Any = line
    session = sessions.introduce(connection, Hello(rid=1, version=1, session="s"), 0.0)
    assert sessions.push_preview(session.client, SHOWN, [b"x"])
    assert line.sent == [(codec.encode(SHOWN), b"x")]
    assert not sessions.push_preview("nobody", SHOWN, [b"x"])

    line.takes = Sent.BLOCKED
    assert not sessions.push_preview(session.client, SHOWN, [b"x"])
    assert sessions.dropped_total == 1
    assert not session.outbox
    sessions.push_progress(session.client, "1/j", Progress(job="j", state="running", step=1))
    assert session.outbox

    line.takes = Sent.SENT
    assert not sessions.push_preview(session.client, SHOWN, [b"x"]), "not before what waits"
    sessions.retry_blocked()
    assert sessions.push_preview(session.client, SHOWN, [b"x"])
    assert len(line.sent) == 3
