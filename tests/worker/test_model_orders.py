"""Orders about one model keep their order, and those about another do not wait for them."""

from __future__ import annotations

import threading
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from offloadd.channel.messages import LoadModel, Register, UnloadModel
from offloadd.channel.specs import ModelSpec
from offloadd.worker.model_orders import ModelOrders, model_of
from offloadd.worker.orders import ModelWork


def test_an_order_that_takes_long_holds_up_its_own_model_alone() -> None:
    orders = ModelOrders()
    slow = Register(spec=ModelSpec(name="slow", source="/slow"))
    then, other = LoadModel(name="slow"), LoadModel(name="other")
    for work in (slow, then, other):
        orders.put(work)
    assert orders.take() is slow
    assert orders.take() is other
    taken: list[ModelWork] = []
    thread = threading.Thread(target=lambda: taken.append(orders.take()))
    thread.start()
    while not orders.somebody_waits:
        threading.Event().wait(0.001)
    assert not taken
    orders.done(other)
    orders.done(slow)
    thread.join(10)
    assert taken == [then]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=20), st.randoms())
def test_whatever_is_done_first_each_model_sees_its_orders_in_their_order(
    told: list[tuple[str, bool]], random: Random
) -> None:
    orders = ModelOrders()
    put: list[ModelWork] = [
        LoadModel(name=name) if loads else UnloadModel(name=name) for name, loads in told
    ]
    for work in put:
        orders.put(work)
    done: list[ModelWork] = []
    under_way: list[ModelWork] = []
    while len(done) < len(put):
        busy = {model_of(work) for work in under_way}
        waiting = [work for work in put if not any(work is one for one in (*done, *under_way))]
        if any(model_of(work) not in busy for work in waiting):
            under_way.append(orders.take())
        else:
            finished = under_way.pop(random.randrange(len(under_way)))
            orders.done(finished)
            done.append(finished)
    for name in "abc":
        expected = [id(work) for work in put if model_of(work) == name]
        assert [id(work) for work in done if model_of(work) == name] == expected
