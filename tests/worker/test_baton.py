"""One thread at a time has the device; who waited longest is next, and short work goes first."""

from __future__ import annotations

import threading
import time

from offloadd.worker.baton import Baton, Waiting

PATIENCE_S = 20.0


class Thread:
    """A thread that notes when it has the baton, and keeps it until it is told."""

    def __init__(self, baton: Baton, name: str, order: list[str], *, for_turn: bool) -> None:
        self.waiting = Waiting()
        self.may_go = threading.Event()
        self.got: bool | None = None
        self._baton, self._name, self._order = baton, name, order
        self._for_turn = for_turn
        self._thread = threading.Thread(target=self._run)
        waiting_before = _waiting(baton)
        self._thread.start()
        deadline_s = time.monotonic() + PATIENCE_S
        while _waiting(baton) == waiting_before and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def _run(self) -> None:
        if self._for_turn:
            self.got = self._baton.take_turn(self.waiting)
            if not self.got:
                return
        else:
            self._baton.take()
            self.got = True
        self._order.append(self._name)
        self.may_go.wait(PATIENCE_S)
        self._baton.give_back()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def _waiting(baton: Baton) -> int:
    return len(baton._short) + len(baton._turns)


def test_it_is_handed_on_in_order_and_short_work_goes_first() -> None:
    baton, order = Baton(), list[str]()
    baton.take()
    threads = [
        Thread(baton, "turn 1", order, for_turn=True),
        Thread(baton, "turn 2", order, for_turn=True),
        Thread(baton, "short 1", order, for_turn=False),
        Thread(baton, "short 2", order, for_turn=False),
    ]
    for thread in threads:
        thread.may_go.set()
    baton.give_back()
    for thread in threads:
        thread.join()
    assert order == ["short 1", "short 2", "turn 1", "turn 2"]
    assert baton.try_take()


def test_it_is_lent_to_short_work_alone() -> None:
    baton, order = Baton(), list[str]()
    baton.take()
    turn = Thread(baton, "turn", order, for_turn=True)
    short = Thread(baton, "short", order, for_turn=False)
    short.may_go.set()
    baton.lend()
    assert order == ["short"]
    assert not baton.try_take()
    baton.lend()
    assert order == ["short"]
    turn.may_go.set()
    baton.give_back()
    turn.join()
    short.join()


def test_a_wait_for_a_turn_can_be_given_up_while_it_lasts_and_before_it() -> None:
    baton, order = Baton(), list[str]()
    baton.take()
    thread = Thread(baton, "turn", order, for_turn=True)
    baton.give_up(thread.waiting)
    thread.join()
    assert thread.got is False
    early = Waiting()
    baton.give_up(early)
    baton.give_back()
    assert not baton.take_turn(early)
    assert baton.try_take()


def test_a_turn_that_was_taken_is_not_lost_by_giving_up_the_wait_for_it() -> None:
    baton, order = Baton(), list[str]()
    baton.take()
    thread = Thread(baton, "turn", order, for_turn=True)
    baton.give_back()
    while not order:
        time.sleep(0.001)
    baton.give_up(thread.waiting)
    assert not baton.try_take()
    thread.may_go.set()
    thread.join()
    assert thread.got is True
    assert baton.try_take()


def test_a_thousand_hand_overs_between_many_threads_leave_one_holder() -> None:
    baton, inside, most = Baton(), 0, 0

    def work() -> None:
        for _ in range(100):
            with baton.held():
                look()
                with baton.released():
                    pass
                look()

    def work_in_turns() -> None:
        for _ in range(100):
            assert baton.take_turn(Waiting())
            look()
            baton.lend()
            look()
            baton.give_back()

    def look() -> None:
        nonlocal inside, most
        inside += 1
        time.sleep(0)
        most = max(most, inside)
        inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    threads += [threading.Thread(target=work_in_turns) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert most == 1
    assert baton.try_take()
