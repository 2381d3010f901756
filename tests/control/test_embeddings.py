"""Prompt embeddings in the accounts: they have what weights leave, and weights go first."""

from __future__ import annotations

from typing import Any

from control.plane import Plane

from offloadd.channel.arena import CloseExtent, ExtentOpened, OpenExtent
from offloadd.channel.messages import EmbeddingFigures, LimitEmbeddings, RunJob
from offloadd.channel.specs import ModelSpec
from offloadd.config import Config
from offloadd.control.jobs.jobs import Owner
from offloadd.control.memory.embeddings import Embeddings
from offloadd.control.memory.inheritance import Inheritance
from offloadd.control.memory.memory import HostMemory

PAGE = 4096
MOST_BYTES = 10 * PAGE


def test_the_limit_is_told_when_it_changes_and_only_to_a_worker() -> None:
    room = Embeddings(100)
    assert room.new_limit(1000) is None
    room.worker_ready()
    assert [room.new_limit(left) for left in (1000, 500, 60, 60, -5, 70)] == [
        *(100, None, 60, None, 0, 70)
    ]
    room.worker_lost()
    assert room.new_limit(1000) is None
    room.worker_ready()
    assert room.new_limit(1000) == 100


def test_totals_outlive_the_worker_and_what_was_kept_does_not() -> None:
    room = Embeddings(1000)
    room.worker_ready()
    room.new_limit(1000)
    room.note(EmbeddingFigures(entries=2, size_bytes=300, hits=5, misses=3, evicted=1))
    # What is known of the worker is older than what it was told.
    room.new_limit(200)
    assert room.size_bytes == 200
    room.worker_lost()
    assert room.figures() == {
        "limit_bytes": 0,
        "size_bytes": 0,
        "entries": 0,
        "hits_total": 5,
        "misses_total": 3,
        "evicted_total": 1,
    }
    room.worker_ready()
    room.note(EmbeddingFigures(hits=1, misses=1))
    assert room.figures()["hits_total"] == 6


async def test_weights_take_the_room_and_the_worker_hears_of_it_first() -> None:
    said: list[Any] = []
    held: list[int] = []
    budget_bytes = 12 * PAGE

    def measure(held_bytes: int) -> int:
        held.append(held_bytes)
        return budget_bytes

    memory = HostMemory(
        lambda worker, message, descriptors: said.append(message),
        measure,
        lambda: (),
        lambda: 0.0,
        Inheritance(None),
        MOST_BYTES,
    )
    memory.worker_ready()
    assert said == [LimitEmbeddings(limit_bytes=MOST_BYTES)]
    memory.note_embeddings(EmbeddingFigures(entries=1, size_bytes=9 * PAGE, misses=1))
    assert memory.figures()["host_used_bytes"] == 9 * PAGE
    memory.on_news(OpenExtent(request=1, key="k", sizes=[8 * PAGE], owner="m/unet"))
    # They could be had for weights, so they count as held where the budget is measured.
    assert held[-1] == 9 * PAGE
    assert said[1] == LimitEmbeddings(limit_bytes=4 * PAGE)
    assert isinstance(said[2], ExtentOpened)
    assert [one.piece for one in said[2].segments] == [0]
    assert memory.figures()["host_used_bytes"] == budget_bytes
    assert memory.embedding_figures()["limit_bytes"] == 4 * PAGE
    memory.worker_lost()
    assert memory.embedding_figures()["size_bytes"] == 0
    memory.on_news(CloseExtent(key="k", owner="m/unet"))
    await memory.close()


def test_the_bound_is_a_size_and_0_switches_it_off() -> None:
    assert Config().hosting.embeddings == 256 << 20
    for text, size in (("1GiB", 1 << 30), ("0", 0)):
        config = Config.model_validate({"hosting": {"embeddings": text}})
        assert config.hosting.embeddings == size


def test_a_job_is_the_users_that_asked_for_it() -> None:
    plane = Plane(ModelSpec(name="m", source="/m"))
    owners = []
    for job, user in (("a", "uid:1"), ("b", "uid:2")):
        plane.submit(job, Owner(user, f"{user}:s", "p"))
        owners += [one.owner for one in plane.orders if isinstance(one, RunJob)]
        plane.work()
        plane.end()
        plane.work()
    assert owners == ["uid:1", "uid:2"]
