"""The bound of kept embeddings and the digests that they are found by."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offloadd.hosting.embeddings.keys import NoDigest, digest
from offloadd.hosting.embeddings.store import ENTRY_BYTES, EmbeddingStore, Entry, Key

ROOM = 3 * ENTRY_BYTES + 100


class Sized:
    """A tensor as far as the store looks at it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


KEYS = st.builds(Key, st.integers(0, 1), st.sampled_from([b"a", b"b", b"c", b"d"]))


class StoreRules(RuleBasedStateMachine):
    """Against a list in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.store = EmbeddingStore(ROOM)
        self.limit_bytes = ROOM
        self.expected: list[tuple[Key, Entry, dict[int, int]]] = []

    def _find(self, key: Key) -> tuple[Key, Entry, dict[int, int]] | None:
        return next((one for one in self.expected if one[0] == key), None)

    def _shrink(self) -> None:
        while self.expected and self._size() > self.limit_bytes:
            self.expected.pop(0)

    def _size(self) -> int:
        return sum(ENTRY_BYTES + sum(blobs.values()) for _, _, blobs in self.expected)

    @rule(key=KEYS)
    def ask(self, key: Key) -> None:
        found, known = self.store.find(key), self._find(key)
        assert (found is None) == (known is None)
        if known is not None:
            assert found is known[1]
            assert {number: one.nbytes for number, one in known[1].blobs.items()} == known[2]
            self.expected.remove(known)
            self.expected.append(known)
        else:
            self.expected.append((key, self.store.begin(key, "form"), {}))
            self._shrink()

    @rule(key=KEYS, number=st.integers(0, 2), size=st.integers(0, 2 * ENTRY_BYTES))
    def add(self, key: Key, number: int, size: int) -> None:
        known = self._find(key)
        if known is None:
            self.store.add(key, Entry("form"), number, Sized(size))
            return
        self.store.add(key, known[1], number, Sized(size))
        if number in known[2]:
            return
        own = ENTRY_BYTES + sum(known[2].values()) + size
        self.expected.remove(known)
        if own <= self.limit_bytes:
            known[2][number] = size
            self.expected.append(known)
            self._shrink()

    @rule(limit=st.sampled_from([0, ENTRY_BYTES, 2 * ENTRY_BYTES, ROOM]))
    def limit(self, limit: int) -> None:
        self.limit_bytes = limit
        self.store.set_limit(limit)
        self._shrink()

    @rule(encoder=st.integers(0, 1))
    def drop(self, encoder: int) -> None:
        self.store.drop(encoder)
        self.expected = [one for one in self.expected if one[0].encoder != encoder]

    @rule(key=KEYS)
    def discard(self, key: Key) -> None:
        self.store.discard(key)
        self.expected = [one for one in self.expected if one[0] != key]

    @invariant()
    def holds_what_is_expected_within_the_bound(self) -> None:
        figures = self.store.figures()
        assert figures.entries == len(self.expected)
        assert figures.size_bytes == self._size() <= self.limit_bytes


TestStoreRules = StoreRules.TestCase

tensors = st.builds(
    lambda values, dtype, shape: torch.tensor(values, dtype=dtype).reshape(shape),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bool]),
    st.sampled_from([(4,), (2, 2), (1, 4), (4, 1)]),
)
plain = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.integers()
    | st.floats()
    | st.sampled_from([0.0, -0.0, 1.0])
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from([torch.float32, torch.float16, torch.device("cpu")])
    | tensors
)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


def seen(value: Any) -> Any:
    """What there is to tell a value by, in a form that compares."""
    if isinstance(value, torch.Tensor):
        rest = (str(value.dtype), tuple(value.shape), value.stride())
        return ("tensor", rest, value.numpy().tobytes())
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [seen(one) for one in value])
    if isinstance(value, dict):
        return ("dict", {key: seen(one) for key, one in value.items()})
    return (type(value).__name__, value)


@given(values, values)
def test_two_values_have_one_digest_only_if_they_are_the_same(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) == (seen(one) == seen(other))
    assert digest(one) == digest(one)


@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_what_is_said_one_after_the_other_does_not_run_together(
    one: list[str], other: list[str]
) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1: 2},
        torch.nn.Parameter(torch.zeros(1)),
        torch.zeros(1, device="meta"),
        torch.zeros(1, requires_grad=True),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(1, dtype=torch.complex64).conj(),
        {1},
        [torch.zeros(1).numpy()],
    ],
)
def test_what_is_not_plain_has_no_digest(value: Any) -> None:
    with pytest.raises(NoDigest):
        digest("before", value)
