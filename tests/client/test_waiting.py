"""How long a caller waits and what it is told, as a table of times."""

from __future__ import annotations

import pytest
from client.test_session import ask, greet, new_session, refuse, sent

from offload_client.conversation import SILENCE_S
from offload_client.session import Session
from offload_client.waiting import ConnectionMissing, Wait
from offload_protocol.errors import ProtocolMismatch, TimedOut


def connected() -> Session:
    session = new_session()
    greet(session)
    return session


def test_a_wait_without_limit_goes_on_while_the_daemon_is_there() -> None:
    wait = Wait("it", 0.0, None, 30.0)
    wait.check(connected(), 1e6)
    assert wait.next_check(connected()) is None


def test_a_wait_ends_at_its_deadline_and_says_what_did_not_come() -> None:
    wait = Wait("the answer to stats", 10.0, 5.0, 30.0)
    session = connected()
    wait.check(session, 14.9)
    assert wait.next_check(session) == 15.0
    with pytest.raises(TimedOut, match=r"the answer to stats did not come within 5\.0 s") as caught:
        wait.check(session, 15.0)
    assert caught.value.details == {"timeout_s": 5.0, "silent_s": 15.0}
    assert "stopped" in caught.value.hint


def test_a_daemon_that_was_just_heard_is_said_to_be_busy() -> None:
    session = connected()
    session.receive([b"\x80"], 14.9)
    with pytest.raises(TimedOut, match="busy") as caught:
        Wait("it", 10.0, 5.0, 30.0).check(session, 15.0)
    assert "timeout_s" in caught.value.hint


@pytest.mark.parametrize(
    ("lost_at", "started_at", "gives_up_at"), [(5.0, 1.0, 35.0), (5.0, 50.0, 80.0)]
)
def test_a_lost_connection_is_waited_out_from_the_later_of_loss_and_start(
    lost_at: float, started_at: float, gives_up_at: float
) -> None:
    session = connected()
    session.connection_lost(lost_at)
    wait = Wait("it", started_at, None, 30.0)
    assert wait.next_check(session) == gives_up_at
    wait.check(session, gives_up_at - 0.1)
    with pytest.raises(ConnectionMissing):
        wait.check(session, gives_up_at)


def test_an_unanswered_ping_counts_as_a_lost_connection() -> None:
    session = connected()
    ask(session)
    session.tick(SILENCE_S)
    wait = Wait("it", 0.0, None, 30.0)
    with pytest.raises(ConnectionMissing):
        wait.check(session, SILENCE_S + 30.0)


def test_a_refused_hello_ends_every_wait() -> None:
    session = new_session()
    session.connection_made(0.0)
    (hello,) = sent(session)
    refuse(session, hello.rid, "protocol_mismatch")
    with pytest.raises(ProtocolMismatch):
        Wait("it", 0.0, None, 30.0).check(session, 0.0)
