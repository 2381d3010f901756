"""Peers that mean no good, for the tests and for `bench/fuzz.py`: what they say, and how."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from hypothesis import strategies as st

from offload_client import Client
from offload_protocol import codec
from offload_protocol.errors import OffloadError
from offload_protocol.messages import PROTOCOL_VERSION, REQUESTS, Hello

SLOWEST_PING_S = 5.0

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=50)
    | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FIELDS = sorted({name for kind in REQUESTS.values() for name in kind.__struct_fields__})
REFERENCES = st.fixed_dictionaries(
    {"$array": PLAIN, "dtype": st.sampled_from(["uint8", "float64", "none"]), "shape": PLAIN}
)
REQUEST = st.builds(
    lambda op, rid, fields: {"op": op, "rid": rid, **fields},
    # `drain` and the models are an administrator's, which this user is, to change for everybody.
    st.sampled_from(sorted(set(REQUESTS) - {"drain", "load", "unload", "pin"})) | st.text(),
    st.integers(0, 2**32) | PLAIN,
    st.dictionaries(
        st.sampled_from([name for name in FIELDS if name != "rid"]), PLAIN | REFERENCES, max_size=6
    ),
)


def random_frames(chance: random.Random) -> list[bytes]:
    """A message of one to three frames of random bytes."""
    parts = [chance.randbytes(chance.choice((0, 1, 9, 200, 5000))) for _ in range(3)]
    return parts[: chance.randint(1, 3)]


class Stranger:
    """A DEALER that says anything, and reads what it is answered so that it is not held back."""

    def __init__(self, endpoint: str, *, greets: bool) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        if greets:
            self.say(codec.encode(Hello(rid=0, version=PROTOCOL_VERSION, session="stranger")))

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)
        while self._socket.poll(0):
            self._socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def served_meanwhile(endpoint: str) -> Iterator[list[float]]:
    """A good client pings and draws all the time, and each of its calls has to be answered.

    Gives the longest ping in seconds, as the only item of a list that goes on changing.
    """
    over, failures, longest_s = threading.Event(), [], [0.0]

    def serve() -> None:
        try:
            with Client(endpoint, timeout_s=30) as client:
                while not over.is_set():
                    longest_s[0] = max(longest_s[0], client.ping())
                    client.generate("noop")
        except OffloadError as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield longest_s
    finally:
        over.set()
        thread.join()
    assert not failures
    assert longest_s[0] < SLOWEST_PING_S
