"""What waits for a slow client is bounded; progress gives way, answers go first, ends stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offloadd.control.clients.outbox import (
    MAX_PROGRESSES,
    MAX_REPLIES_BYTES,
    Outbox,
    Outcome,
    Waiting,
)


def drained(outbox: Outbox) -> list[Waiting]:
    sent: list[Waiting] = []

    def send(waiting: Waiting) -> bool:
        sent.append(waiting)
        return True

    outbox.flush(send)
    return sent


def test_answers_leave_first_then_ends_then_progress() -> None:
    outbox = Outbox()
    outbox.add_progress("p", b"progress")
    outbox.add_finished("f")
    outbox.add_reply((b"reply",))
    assert drained(outbox) == [Waiting((b"reply",)), Waiting(finished="f"), Waiting((b"progress",))]
    assert not outbox


def test_later_progress_replaces_earlier() -> None:
    outbox = Outbox()
    assert outbox.add_progress("a", b"1") is Outcome.KEPT
    assert outbox.add_progress("a", b"2") is Outcome.DROPPED
    assert drained(outbox) == [Waiting((b"2",))]


def test_progress_of_ended_jobs_is_dropped() -> None:
    outbox = Outbox()
    outbox.add_progress("a", b"1")
    outbox.add_finished("a")
    assert outbox.add_progress("a", b"2") is Outcome.DROPPED
    assert drained(outbox) == [Waiting(finished="a")]


def test_what_could_not_go_stays_in_order() -> None:
    outbox = Outbox()
    for number in range(3):
        outbox.add_reply((b"%d" % number,))
    outbox.flush(lambda waiting: waiting.parts == (b"0",))
    assert drained(outbox) == [Waiting((b"1",)), Waiting((b"2",))]


@given(st.lists(st.tuples(st.sampled_from("rpf"), st.integers(0, 600), st.integers(0, 1 << 20))))
def test_its_bytes_are_bounded_and_no_end_is_lost(puts: list[tuple[str, int, int]]) -> None:
    outbox = Outbox()
    ends = set()
    for kind, job, size in puts:
        if kind == "r":
            outbox.add_reply((b"answer", bytes(min(size, 1 << 20))))
        elif kind == "p":
            outbox.add_progress(str(job), b"progress")
        else:
            outbox.add_finished(str(job))
            ends.add(str(job))
    assert outbox.held_bytes <= MAX_REPLIES_BYTES + MAX_PROGRESSES * len(b"progress")
    assert {one.finished for one in drained(outbox) if one.finished} == ends
