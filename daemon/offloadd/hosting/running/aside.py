"""Puts a job aside in the middle of its call, so that others can use the device, and back again.

What it holds stays where it is if there is room for the next job's activations beside it; otherwise
its tensors move to host memory. Its model's weights are nobody's: they may give way meanwhile.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from types import FrameType

import psutil
import torch
from torch import nn

from offloadd.hosting.device_host import DeviceHost
from offloadd.hosting.running.global_state import OwnSettings, Randomness, keeps_steps_in_modules
from offloadd.hosting.running.job_tensors import MovedAside, storages_of, tensors_of
from offloadd.offload.weights.absent import AbsentWeight

HOST_MARGIN = 1.25
"""Host memory that has to be there for each byte that moves, so that it is not the last."""

_log = logging.getLogger(__name__)


class JobAside:
    """One run of a pipeline; `outermost` is the frame that called it. Only its thread uses this.

    `on_settings` is told when the modules' settings were exchanged.
    """

    def __init__(
        self,
        host: DeviceHost,
        modules: Mapping[str, nn.Module],
        outermost: FrameType,
        on_settings: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._modules = modules
        self._outermost: FrameType | None = outermost
        self._settings = OwnSettings(list(modules.values()), on_settings)
        self._settings.put_back()
        self._randomness: Randomness | None = None
        self._is_away = False
        self._moved: MovedAside | None = None
        self._staying_bytes = 0
        self._turn_began_bytes = host.engine.counters.moved_bytes
        self._earlier_turns_bytes = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights that moved to the device in this job's turns."""
        this_turn = self._host.engine.counters.moved_bytes - self._turn_began_bytes
        return self._earlier_turns_bytes + this_turn

    def leave(self) -> int | None:
        """Put the job aside; gives the bytes of its tensors, or None where it has to go on.

        That is where they would have to move and the host has no room, or where hooks in the
        modules keep state of this call.
        """
        if keeps_steps_in_modules(self._modules.values()):
            return None
        storages = self._storages()
        held_bytes = sum(storage.nbytes() for storage in storages)
        if not self._host.has_room_for_parked(held_bytes):
            if psutil.virtual_memory().available < held_bytes * HOST_MARGIN:
                return None
            self._moved = MovedAside(storages)
            _log.info("a parked job's %d bytes moved to host memory", self._moved.size_bytes)
        self._staying_bytes = held_bytes - (self._moved.size_bytes if self._moved else 0)
        self._host.parked_bytes += self._staying_bytes
        self._earlier_turns_bytes = self.moved_bytes
        self._settings.put_away()
        self._randomness = Randomness.now(self._host.device)
        self._is_away = True
        return held_bytes

    def come_back(self) -> None:
        """Put everything in place again; raises what allocating raises if there is no room."""
        self._turn_began_bytes = self._host.engine.counters.moved_bytes
        self._forget_place()
        self._is_away = False
        if self._moved is not None:
            self._move_back(self._moved)
            self._moved = None
        self._settings.put_back()
        assert self._randomness is not None  # it was put aside
        self._randomness.restore(self._host.device)

    def close(self) -> None:
        """The run is over, however it ended."""
        self._forget_place()
        # The frame holds this object as well, and everything that the run has made.
        self._moved = self._outermost = None
        if not self._is_away:
            # A job that ends while it is away has put them back, and another may use them now.
            self._settings.give_up()

    def _forget_place(self) -> None:
        self._host.parked_bytes -= self._staying_bytes
        self._staying_bytes = 0

    def _move_back(self, moved: MovedAside) -> None:
        try:
            moved.move_back()
        except RuntimeError:
            # No memory: weights give way to what a job has computed, and come back group by group.
            self._host.engine.empty()
            moved.move_back()

    def _storages(self) -> list[torch.UntypedStorage]:
        # Asking an absent weight for its storage would bring it.
        weights = {
            tensor.untyped_storage().data_ptr()
            for module in self._modules.values()
            for tensor in (*module.parameters(), *module.buffers())
            if not isinstance(tensor, AbsentWeight) and tensor.device.type != "meta"
        }
        assert self._outermost is not None  # the run is not over
        found = tensors_of(sys._getframe(), self._outermost)
        return [
            storage
            for storage in storages_of(found, self._host.device)
            if storage.data_ptr() not in weights
        ]
