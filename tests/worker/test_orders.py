"""A cancelled job ends once: out of the line, or marked while it runs, and nothing else is hit."""

from __future__ import annotations

import threading

import pytest

from offloadd.channel.messages import LoadModel, RunJob
from offloadd.worker.orders import Orders, Work


def job(name: str) -> RunJob:
    return RunJob(job=name, model="m", arguments={}, seed=0)


@pytest.fixture
def orders() -> Orders:
    return Orders()


def test_orders_are_taken_in_the_order_in_which_they_came(orders: Orders) -> None:
    works: list[Work] = [job("a"), LoadModel(name="m"), job("b")]
    for work in works:
        orders.put(work, [])
    assert [orders.take().work for _ in works] == works


def test_a_waiting_job_is_taken_out_once(orders: Orders) -> None:
    orders.put(job("a"), [])
    orders.put(job("b"), [b"frame"])
    assert orders.cancel("a")
    assert not orders.cancel("a")
    order = orders.take()
    assert (order.work, order.frames) == (job("b"), [b"frame"])
    assert not orders.is_cancelled


def test_a_running_job_is_marked_and_the_next_is_not(orders: Orders) -> None:
    orders.put(job("a"), [])
    orders.put(job("b"), [])
    orders.take()
    assert not orders.cancel("a")
    assert orders.is_cancelled
    orders.done()
    orders.take()
    assert not orders.is_cancelled


def test_a_job_that_has_ended_is_not_marked(orders: Orders) -> None:
    orders.put(job("a"), [])
    orders.take()
    orders.done()
    assert not orders.cancel("a")
    assert not orders.is_cancelled


def test_taking_waits_for_an_order(orders: Orders) -> None:
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(orders.take().work))
    thread.start()
    orders.put(job("a"), [])
    thread.join(timeout=10)
    assert taken == [job("a")]


def test_a_wait_for_an_order_can_be_bounded(orders: Orders) -> None:
    assert orders.take_within(0.01) is None
    orders.put(job("a"), [])
    order = orders.take_within(0.01)
    assert order is not None
    assert order.work == job("a")
