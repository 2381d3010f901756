"""Who listens to the control plane: one at a time, and somebody whatever a job does."""

from __future__ import annotations

import threading
import time

from offloadd.worker.listening import Ear, Listening


class Place:
    """A receiver's ear, one of a crew, and how often the crew had to send another."""

    def __init__(self) -> None:
        self.listening = Listening()
        self.losses = 0
        self.receiver = Ear(self.listening, lambda: None)
        self.member = self.new_member()

    def new_member(self) -> Ear:
        return Ear(self.listening, self._lose)

    def _lose(self) -> None:
        self.losses += 1

    def waiting(self) -> threading.Thread:
        """The receiver waits to listen."""
        thread = threading.Thread(target=self.listening.wait_for, args=(self.receiver,))
        thread.start()
        return thread

    def handed(self) -> None:
        """The receiver has listened, and handed its job to the crew's."""
        self.listening.wait_for(self.receiver)
        self.listening.hand_over(self.receiver)
        self.member.begin(is_handed=True)


def test_whoever_is_handed_a_job_listens_after_it() -> None:
    place = Place()
    place.listening.wait_for(place.receiver)
    assert not place.member.listens()
    place.listening.hand_over(place.receiver)
    assert not place.new_member().listens()
    place.member.begin(is_handed=True)
    assert place.member.listens()
    assert place.losses == 0


def test_the_receiver_listens_when_a_job_lets_go_and_somebody_takes_the_next_one() -> None:
    place = Place()
    place.handed()
    receiver = place.waiting()
    place.member.let_go()
    receiver.join(20)
    assert not receiver.is_alive()
    assert place.losses == 1
    assert not place.member.listens()
    place.member.let_go()
    assert place.losses == 1


def test_the_receiver_takes_over_from_a_job_that_was_to_be_brief_and_is_not() -> None:
    place = Place()
    place.handed()
    place.listening.wait_for(place.receiver)
    assert place.losses == 1
    assert not place.member.listens()


def test_a_job_that_is_received_later_is_watched_as_well() -> None:
    place = Place()
    place.handed()
    assert place.member.listens()
    receiver = place.waiting()
    while not place.listening._is_asleep:
        time.sleep(0.001)
    assert receiver.is_alive()
    place.member.begin(is_handed=False)
    receiver.join(20)
    assert not receiver.is_alive()
    assert place.losses == 1


def test_who_takes_a_job_too_late_does_not_listen_and_is_replaced() -> None:
    place = Place()
    place.listening.wait_for(place.receiver)
    place.listening.hand_over(place.receiver)
    place.listening.wait_for(place.receiver)
    place.member.begin(is_handed=True)
    assert place.losses == 1
    assert not place.member.listens()


def test_many_threads_never_listen_at_once() -> None:
    place = Place()
    listeners = 0
    overlaps = 0
    stop = threading.Event()

    def member() -> None:
        nonlocal listeners, overlaps
        ear = place.new_member()
        while not stop.is_set():
            if ear.listens():
                listeners += 1
                overlaps += listeners > 1
                listeners -= 1
                ear.begin(is_handed=False)
                ear.let_go()

    threads = [threading.Thread(target=member) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        place.listening.wait_for(place.receiver)
        listeners += 1
        overlaps += listeners > 1
        listeners -= 1
        place.listening.let_go(place.receiver)
    stop.set()
    for thread in threads:
        thread.join()
    assert overlaps == 0
