"""The thread that listens to the control plane; the process ends when the channel closes.

It runs before torch is imported and beside whatever the device thread does, so that a closed
channel ends the process at once and a cancel is noticed at the next border.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import NoReturn

from offload_protocol.codec import error_info
from offload_protocol.errors import Cancelled
from offloadd.channel.framing import ChannelClosed, WorkerEnd
from offloadd.channel.messages import CancelJob, JobEnded, LoadModel, Register, RunJob, UnloadModel
from offloadd.store.arena.client import ArenaClient
from offloadd.worker.exits import CHANNEL_CLOSED
from offloadd.worker.orders import Orders

_log = logging.getLogger(__name__)


def start_receiver(channel: WorkerEnd, orders: Orders, arena: ArenaClient) -> threading.Thread:
    """Start listening; returns at once."""
    work = (channel, orders, arena)
    thread = threading.Thread(target=_receive, args=work, name="receiver", daemon=True)
    thread.start()
    return thread


def end_process(code: int) -> NoReturn:
    """End without waiting for anything: neither threads nor a device that may hang."""
    logging.shutdown()
    os._exit(code)


def _receive(channel: WorkerEnd, orders: Orders, arena: ArenaClient) -> None:
    try:
        while True:
            message, frames, descriptors = channel.receive_all()
            match message:
                case CancelJob(job=job):
                    if orders.cancel(job):
                        error = error_info(Cancelled("the job was cancelled before it began"))
                        channel.send(JobEnded(job=job, error=error))
                case Register() | LoadModel() | UnloadModel() | RunJob():
                    orders.put(message, frames)
                case _:
                    arena.handle(message, descriptors)
    except ChannelClosed as reason:
        _log.info("channel closed, ending: %s", reason)
        end_process(CHANNEL_CLOSED)
