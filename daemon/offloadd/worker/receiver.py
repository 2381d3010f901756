"""Listens to the control plane; the process ends when the channel closes.

The receiver's thread runs before torch is imported and beside whatever the other threads do, so
that a closed channel ends the process at once and a cancel is noticed at the next border. A thread
of the crew that has nothing to do, or next to nothing, listens in its place (see `listening`).
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import NoReturn

from offloadd.channel.framing import ChannelClosed, WorkerEnd
from offloadd.channel.messages import (
    CancelJob,
    GiveWay,
    LimitEmbeddings,
    LoadModel,
    Register,
    ResumeJob,
    RunJob,
    UnloadModel,
)
from offloadd.hosting.embeddings.store import EmbeddingStore
from offloadd.store.arena.client import ArenaClient
from offloadd.worker.exits import CHANNEL_CLOSED
from offloadd.worker.listening import Ear, Listening
from offloadd.worker.model_orders import ModelOrders
from offloadd.worker.orders import Order, Orders
from offloadd.worker.turns import Turns

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Desk:
    """Where what arrives is put: jobs, orders about models, and what concerns turns and memory."""

    jobs: Orders
    models: ModelOrders
    turns: Turns
    arena: ArenaClient
    listening: Listening
    embeddings: EmbeddingStore


def start_receiver(channel: WorkerEnd, desk: Desk) -> threading.Thread:
    """Start listening; returns at once."""
    thread = threading.Thread(target=_receive, args=(channel, desk), name="receiver", daemon=True)
    thread.start()
    return thread


def end_process(code: int) -> NoReturn:
    """End without waiting for anything: neither threads nor a device that may hang."""
    logging.shutdown()
    os._exit(code)


def next_job(channel: WorkerEnd, desk: Desk) -> Order:
    """Listen until a job comes, and put everything else where it belongs.

    Raises `ChannelClosed`.
    """
    while True:
        message, frames, descriptors = channel.receive_all()
        match message:
            case RunJob(job=job):
                # Its turn exists before any thread has taken it, so that a cancel finds it.
                return Order(message, frames, desk.turns.begin(job))
            case CancelJob(job=job):
                desk.turns.cancel(job)
            case GiveWay(job=job):
                desk.turns.give_way(job)
            case ResumeJob(job=job):
                desk.turns.resume(job)
            case LimitEmbeddings(limit_bytes=limit_bytes):
                # Here, so that room is made before anything that was said after this is done.
                desk.embeddings.set_limit(limit_bytes)
            case Register() | LoadModel() | UnloadModel():
                desk.models.put(message)
            case _:
                desk.arena.handle(message, descriptors)


def _receive(channel: WorkerEnd, desk: Desk) -> None:
    ear = Ear(desk.listening, lambda: None)
    try:
        while True:
            desk.listening.wait_for(ear)
            job = next_job(channel, desk)
            desk.listening.hand_over(ear)
            desk.jobs.put(job)
    except ChannelClosed as reason:
        _log.info("channel closed, ending: %s", reason)
        end_process(CHANNEL_CLOSED)
