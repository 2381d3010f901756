"""Starts a worker: `python -m offloadd.worker --channel-fd N --device auto|cpu|cuda:N`.

The channel is listened to before torch is imported, so that the process ends with its control
plane whatever it is doing.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
from collections.abc import Sequence

from offloadd.channel.framing import ChannelClosed, WorkerEnd
from offloadd.channel.parent import end_with_parent
from offloadd.hosting.embeddings.store import EmbeddingStore
from offloadd.store.arena.client import ArenaClient
from offloadd.store.reader import DiskReader
from offloadd.worker.exits import CHANNEL_CLOSED, NO_DEVICE
from offloadd.worker.journal_log import start_log
from offloadd.worker.listening import Listening
from offloadd.worker.model_orders import ModelOrders
from offloadd.worker.orders import Orders
from offloadd.worker.receiver import Desk, end_process, start_receiver
from offloadd.worker.turns import Turns

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the channel closes or the device fails; never returns normally."""
    options = _parse(arguments)
    start_log()
    # Ctrl-C at a terminal reaches the whole process group; stopping is the control plane's to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The channel is the first line of defence; this one also holds while a C call keeps the
    # interpreter's lock, so that no Python thread could notice the close.
    end_with_parent()
    _wait_without_spinning()
    channel = WorkerEnd(socket.socket(fileno=options.channel_fd))
    reader = DiskReader()
    arena = ArenaClient(reader, channel.send)
    turns, listening = Turns(channel.send), Listening()
    desk = Desk(Orders(), ModelOrders(), turns, arena, listening, EmbeddingStore())
    start_receiver(channel, desk)

    from offloadd.worker.device import DeviceMissing, find_device, report

    try:
        device = find_device(options.device)
        _log.info("found device=%s name=%r", device.torch_device, device.name)
        # Said before the model libraries are imported, which takes several times as long as torch.
        channel.send(report(device, resident_bytes=0))
    except DeviceMissing as error:
        _log.error("no device: %s", error)
        end_process(NO_DEVICE)
    except ChannelClosed:
        end_process(CHANNEL_CLOSED)

    from offloadd.worker.crew import Crew

    Crew(channel, desk, device, reader).run()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="offloadd.worker", description=__doc__)
    parser.add_argument("--channel-fd", type=int, required=True, help="connected socket to use")
    parser.add_argument("--device", type=_device_choice, default="auto", help="auto, cpu or cuda:N")
    return parser.parse_args(arguments)


def _device_choice(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, cpu, cuda:N")
    return text


def _wait_without_spinning() -> None:
    # Read when torch is imported. By default OpenMP's threads spin while they wait for one another,
    # which takes the cores from the very thread that they wait for as soon as other programs want
    # them too: 50 steps of `shapes` on two busy cores took 47 s (18 s of processor time), and 6 s
    # (1.4 s) without spinning.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


if __name__ == "__main__":
    main()
