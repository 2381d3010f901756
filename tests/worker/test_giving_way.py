"""What a job does at a border follows from what was said of it, in whatever order that came."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from offload_protocol.errors import Cancelled
from offloadd.channel.messages import JobParked, JobStays
from offloadd.worker.turns import JobTurn, Turns

PATIENCE_S = 20.0


class Aside:
    """Notes what is done with it; with `held_bytes` None there is no room for it."""

    def __init__(self, held_bytes: int | None = 7) -> None:
        self.done: list[str] = []
        self._held_bytes = held_bytes

    def leave(self) -> int | None:
        self.done.append("left")
        return self._held_bytes

    def come_back(self) -> None:
        self.done.append("came back")


class Said:
    """What the job's thread said; other threads wait for it here."""

    def __init__(self) -> None:
        self.messages: list[JobParked | JobStays] = []
        self.on_message: Callable[[], None] = lambda: None

    def __call__(self, message: JobParked | JobStays) -> None:
        self.messages.append(message)
        self.on_message()


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def turns(said: Said) -> Turns:
    return Turns(said)


@pytest.fixture
def turn(turns: Turns) -> JobTurn:
    turn = turns.begin("a")
    turn.take()
    return turn


def test_a_border_where_nothing_was_said_does_nothing(turn: JobTurn, said: Said) -> None:
    aside = Aside()
    turn.at_border(aside)
    assert (aside.done, said.messages) == ([], [])


def test_a_job_parks_once_for_each_time_it_is_asked(
    turns: Turns, turn: JobTurn, said: Said
) -> None:
    # The answer may come before the job has begun to wait.
    said.on_message = lambda: turns.resume("a")
    for _ in range(2):
        aside = Aside()
        turns.give_way("a")
        turn.at_border(aside)
        turn.at_border(aside)
        assert aside.done == ["left", "came back"]
    assert said.messages == [JobParked(job="a", held_bytes=7)] * 2
    assert not turns.baton.try_take(), "it has the device again"


def test_a_job_without_room_to_leave_says_so_and_goes_on(
    turns: Turns, turn: JobTurn, said: Said
) -> None:
    aside = Aside(held_bytes=None)
    turns.give_way("a")
    turn.at_border(aside)
    assert said.messages == [JobStays(job="a")]
    assert aside.done == ["left"]
    assert not turns.baton.try_take()


def test_a_parked_job_that_is_cancelled_stops_with_the_device_and_does_not_come_back(
    turns: Turns, turn: JobTurn, said: Said
) -> None:
    said.on_message = lambda: turns.cancel("a")
    aside = Aside()
    turns.give_way("a")
    with pytest.raises(Cancelled):
        turn.at_border(aside)
    assert aside.done == ["left"]
    turn.give_back()
    assert turns.baton.try_take()


def test_a_job_that_goes_on_waits_until_the_device_is_free(
    turns: Turns, turn: JobTurn, said: Said
) -> None:
    parked = threading.Event()
    said.on_message = parked.set
    aside = Aside()
    turns.give_way("a")
    thread = threading.Thread(target=turn.at_border, args=(aside,))
    thread.start()
    assert parked.wait(PATIENCE_S)
    turns.baton.take()
    turns.resume("a")
    thread.join(0.05)
    assert aside.done == ["left"]
    turns.baton.give_back()
    thread.join(PATIENCE_S)
    assert aside.done == ["left", "came back"]


def test_a_job_is_cancelled_while_it_waits_for_its_first_turn(turns: Turns, said: Said) -> None:
    turn = turns.begin("b")
    said.on_message = lambda: turns.cancel("b")
    with pytest.raises(Cancelled):
        turn.await_resume()
    with pytest.raises(Cancelled):
        turn.take()
    assert turns.baton.try_take()


def test_what_is_said_of_a_job_that_is_not_here_does_nothing(turns: Turns) -> None:
    turns.begin("a")
    turns.end("a")
    for say in (turns.cancel, turns.give_way, turns.resume):
        say("a")
