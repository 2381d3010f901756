"""Orders are handed out in their order, to the thread that has worked last."""

from __future__ import annotations

import threading

import pytest

from offloadd.channel.messages import RunJob
from offloadd.worker.baton import Baton
from offloadd.worker.orders import Order, Orders
from offloadd.worker.turns import JobTurn


def order(name: str) -> Order:
    job = RunJob(job=name, model="m", arguments={}, seed=1)
    return Order(job, (), JobTurn(name, Baton(), lambda message: None))


@pytest.fixture
def orders() -> Orders:
    return Orders()


def wait_until_takers(orders: Orders, count: int) -> None:
    while len(orders._takers) < count:
        threading.Event().wait(0.001)


def test_orders_are_taken_in_the_order_in_which_they_came(orders: Orders) -> None:
    sent = [order("a"), order("b"), order("c")]
    for one in sent:
        orders.put(one)
    assert [orders.take() for _ in sent] == sent


def test_the_thread_that_began_to_wait_last_gets_the_next_order(orders: Orders) -> None:
    taken: list[tuple[str, Order]] = []
    threads = []
    for count, name in enumerate(("first", "second"), 1):

        def take(name: str = name) -> None:
            taken.append((name, orders.take()))

        threads.append(threading.Thread(target=take))
        threads[-1].start()
        wait_until_takers(orders, count)
    assert orders.somebody_waits
    one, other = order("a"), order("b")
    orders.put(one)
    threads[1].join(timeout=10)
    orders.put(other)
    threads[0].join(timeout=10)
    assert taken == [("second", one), ("first", other)]
    assert not orders.somebody_waits


def test_a_wait_for_an_order_can_be_bounded(orders: Orders) -> None:
    assert orders.take_within(0.01) is None
    assert not orders.somebody_waits
    one = order("a")
    orders.put(one)
    assert orders.take_within(0.01) is one
